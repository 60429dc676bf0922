"""The loss of a trained state, and how sure it is."""

import jax
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax

from tests import tiny
from tied_lm.data.toy import ToyStream
from tied_lm.study.evaluation import evaluate
from tied_lm.study.heldout import ClusterCount
from tied_lm.train import evaluation
from tied_lm.train.build import build_stream
from tied_lm.train.loop import evaluation_scalars

CONFIG = tiny.make_config()


def per_sequence(config, params, sequences):
    """Losses, excess and bands of the tokens of each held-out sequence, in float64."""
    stream = build_stream(config)
    batches = [stream.heldout(i) for i in range(-(-sequences // config.data.batch_size))]
    inputs, targets = (np.concatenate([np.asarray(b[i]) for b in batches])[:sequences] for i in (0, 1))
    W = np.asarray(params["embedding"], np.float64)
    logp = log_softmax(W[inputs] @ W.T, axis=-1)
    nll = -np.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    V = W.shape[0]
    pairs = np.repeat(np.arange(V), V), np.tile(np.arange(V), V)
    log_law = np.asarray(stream.log_likelihood(*pairs), np.float64).reshape(V, V)[inputs]
    return nll, np.sum(np.exp(log_law) * (log_law - logp), axis=-1), targets


def t_interval(values):
    half = stats.t.ppf(0.975, values.size - 1) * values.std(ddof=1) / np.sqrt(values.size)
    return [values.mean() - half, values.mean() + half]


def test_whole_sequences_give_the_t_interval_of_their_means(monkeypatch):
    monkeypatch.setattr(ToyStream, "perplexity", True)
    trainer, params = tiny.trainer_of(CONFIG), tiny.trajectory(CONFIG)[30].params
    found = evaluate(trainer, params, build_stream(CONFIG), 35)  # 7 sequences, half a batch at the end
    nll, excess, targets = per_sequence(CONFIG, params, 7)
    assert (found.tokens, found.sequences) == (35, 7)
    assert found.eval_loss.mean == pytest.approx(nll.mean(), rel=1e-5)
    assert found.eval_loss.ci95_heldout == pytest.approx(t_interval(nll.mean(axis=1)), rel=1e-5)
    assert found.excess.mean == pytest.approx(excess.mean(), rel=1e-4)
    assert found.excess.ci95_heldout == pytest.approx(t_interval(excess.mean(axis=1)), rel=1e-3)
    assert found.perplexity.mean == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    assert found.perplexity.ci95_heldout == pytest.approx(np.exp(t_interval(nll.mean(axis=1))), rel=1e-4)
    bands = np.asarray(trainer.bands)[targets]
    for band, values in found.bands.items():
        assert values.mean == pytest.approx(nll[bands == int(band)].mean(), rel=1e-5)
    assert set(found.bands) == set(map(str, np.unique(bands)))
    one = evaluate(trainer, params, build_stream(CONFIG), 1)
    assert {band for band, values in one.bands.items() if values is not None} == {str(bands[0, 0])}
    assert one.bands.keys() == found.bands.keys()


def test_a_perplexity_that_no_float_holds_is_left_out(monkeypatch):
    monkeypatch.setattr(ToyStream, "perplexity", True)
    trainer, stream = tiny.trainer_of(CONFIG), build_stream(CONFIG)
    params = jax.tree.map(lambda leaf: 300 * leaf, tiny.trajectory(CONFIG)[30].params)
    found = evaluate(trainer, params, stream, 35)
    assert 710 < found.eval_loss.mean < np.inf
    assert found.perplexity is None
    scalars = evaluation_scalars(jax.device_get(evaluation.evaluate(trainer, params, stream, 35)), stream)
    assert scalars.keys() >= {"loss/eval"}
    assert "loss/perplexity" not in scalars


def test_the_loss_is_that_of_the_run():
    trainer, params, stream = tiny.trainer_of(CONFIG), tiny.trajectory(CONFIG)[39].params, build_stream(CONFIG)
    found = evaluate(trainer, params, stream, 23)
    scalars = evaluation_scalars(jax.device_get(evaluation.evaluate(trainer, params, stream, 23)), stream)
    assert found.eval_loss.mean == pytest.approx(scalars["loss/eval"], rel=1e-12)
    assert found.sequences == 5  # the last of three tokens
    assert found.perplexity is None  # it means nothing for this stream
    assert found.bits_per_byte is None


def test_text_has_no_excess_and_one_sequence_no_interval(tmp_path):
    config = tiny.write_letters(tmp_path)
    trainer, stream = tiny.trainer_of(config), build_stream(config)
    found = evaluate(trainer, trainer.init(np.uint32(0)).params, stream, 5)
    assert found.excess is None
    assert found.sequences == 1
    assert found.eval_loss.ci95_heldout is None
    assert found.bits_per_byte.mean == pytest.approx(found.eval_loss.mean / np.log(2))  # a token is a byte


def test_a_state_that_is_carried_on_makes_a_row_of_the_batches_one_sequence(tmp_path):
    config = tiny.sequences(tmp_path, "stateful lstm, dropout, coupled adam", "data.batch_size=3")
    trainer, stream = tiny.new_trainer(config), build_stream(config)
    params = trainer.init(np.uint32(0)).params
    found = evaluate(trainer, params, stream, 60)  # 4 batches of 3 rows
    sums = jax.device_get(evaluation.evaluate(trainer, params, stream.heldout_ahead(60), 60))
    rows = np.asarray(sums.nll, np.float64).sum(axis=1).reshape(4, 3).sum(axis=0) / 20
    assert found.clusters == ClusterCount("lane", 3)
    assert found.eval_loss.ci95_heldout == pytest.approx(t_interval(rows), rel=1e-9)
