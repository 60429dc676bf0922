"""The toy stream against its law, written out as a V x V table."""

import dataclasses
import hashlib
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from configs import toy
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.data.stream import Batch, named_key
from tied_lm.data.toy import ToyStream
from tied_lm.train import evaluation
from tied_lm.train.step import Trainer

DATA = build_run(toy.get_config().to_dict()).data
SHAPE = {"batch_size": 16, "length": 32}


def build(v=37, k=8, seed=0, data_seed=0, **fields):
    """A stream of V tokens in K classes; other fields of `data` by name."""
    return ToyStream.build(dataclasses.replace(DATA, vocab_size=v, classes=k, seed=data_seed, **fields), seed)


def law(v, k, reversibility=1.0, exponent=1.0, kappa=3.0):
    """P[i, j], the probability of j after i."""
    shift = (1 - reversibility) * k / 4
    table = np.empty((v, v))
    for i in range(v):
        moves = np.exp(kappa * np.cos(2 * np.pi * (np.arange(k) - i % k - shift) / k))
        moves /= moves.sum()
        for c in range(k):
            ids = np.arange(c, v, k)
            zipf = (ids // k + 1.0) ** -exponent
            table[i, ids] = moves[c] * zipf / zipf.sum()
    return table


def stationary(table):
    """The law that the chain keeps, from nothing but its table."""
    p = np.full(len(table), 1 / len(table))
    for _ in range(200):
        p = p @ table
    return p


def log_law(stream):
    """log P[i, j] as the stream gives it."""
    ids = np.arange(stream.vocab_size)
    return np.asarray(stream.log_likelihood(ids[:, None], ids[None, :]), np.float64)


def bigram_p_value(counts, table):
    """Chi-square of the transitions from each token; cells that expect fewer than 5 are put together."""
    expected = counts.sum(1, keepdims=True) * table
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    chi2 = np.sum((observed - expected) ** 2 / expected)
    return stats.chi2.sf(chi2, observed.size - 1 - len(table))


batch_of = jax.jit(lambda stream, step: stream.batch(step))


@pytest.fixture(scope="module")
def long_batch():
    stream = build(37, 8, seed=1, reversibility=0.5, batch_size=2000, length=1000)
    return Batch(*(np.asarray(part) for part in batch_of(stream, 0)))


def test_bigrams_of_two_million_tokens_follow_the_law(long_batch):
    x, y = (part.ravel() for part in long_batch[:2])
    assert x.size == 2_000_000
    counts = np.bincount(x * 37 + y, minlength=37 * 37).reshape(37, 37)
    assert bigram_p_value(counts, law(37, 8, 0.5)) > 1e-4
    for wrong in (law(37, 8, 0.49), law(37, 8, 0.5, exponent=1.03), law(37, 8, 0.5, kappa=3.05), law(37, 8, -0.5)):
        assert bigram_p_value(counts, wrong) < 1e-4


def test_sequences_start_in_the_stationary_law_and_stay_there(long_batch):
    expected = 2000 * stationary(law(37, 8, 0.5))
    for tokens in (long_batch.inputs[:, 0], long_batch.targets[:, -1]):
        assert stats.chisquare(np.bincount(tokens, minlength=37), expected).pvalue > 1e-4
    np.testing.assert_array_equal(long_batch.inputs[:, 1:], long_batch.targets[:, :-1])
    assert long_batch.mask.all()
    assert long_batch.mask.shape == (2000, 1000)


@pytest.mark.parametrize("k", [1, 5, 16, 64])
@pytest.mark.parametrize(("reversibility", "exponent"), [(1.0, 1.0), (0.3, 0.7), (0.0, 0.0)])
def test_entropy_and_likelihood_are_those_of_the_table(k, reversibility, exponent):
    stream = build(64, k, reversibility=reversibility, zipf_exponent=exponent)
    table = law(64, k, reversibility, exponent)
    p = stationary(table)
    assert stream.entropy == pytest.approx(-np.sum(p[:, None] * table * np.log(table)), abs=1e-6)
    np.testing.assert_allclose(stream.frequencies, p, rtol=1e-6)
    np.testing.assert_allclose(log_law(stream), np.log(table), atol=1e-5)


def test_entropy_does_not_depend_on_the_direction():
    entropies = [build(64, 16, reversibility=r).entropy for r in (0.0, 0.25, 0.5, 0.75, 1.0)]
    np.testing.assert_allclose(entropies, entropies[0], atol=1e-6)


def test_entropy_of_a_large_vocabulary_costs_nothing():
    begin = time.perf_counter()
    stream = build(50_000, 16, **SHAPE)
    entropy = stream.entropy
    assert time.perf_counter() - begin < 0.5
    assert max(leaf.size for leaf in jax.tree.leaves(stream)) <= 50_000
    batch = batch_of(stream, 0)
    log_p = np.asarray(stream.log_likelihood(batch.inputs, batch.targets), np.float64)
    assert abs(log_p.mean() + entropy) < 5 * log_p.std() / np.sqrt(log_p.size)
    assert 20_000 < batch.inputs.max() < 50_000


def test_detailed_balance_holds_at_1_and_fails_at_0():
    def imbalance(reversibility):
        stream = build(37, 8, reversibility=reversibility)
        flow = stream.frequencies[:, None] * np.exp(log_law(stream))
        return np.abs(flow - flow.T).max() / flow.max()

    # When K does not divide V the classes differ in size, yet each has the same mass.
    assert imbalance(1.0) < 1e-5
    assert imbalance(0.0) > 0.5


def test_excess_of_the_law_is_zero_and_of_another_model_is_not(make_config):
    config = make_config(
        "model.tying=untied", "model.features=32", "data.vocab_size=32", "data.classes=8", "data.reversibility=0.25"
    )
    stream = ToyStream.build(config.data, 0)
    # One-hot vectors looked up, log-probabilities scored: the model that is the law.
    params = {"embedding": np.eye(32, dtype=np.float32), "output": np.log(law(32, 8, 0.25)).T.astype(np.float32)}
    trainer = Trainer(config, np.zeros(32, np.int32))
    found = evaluation.evaluate(trainer, params, stream, 4096)
    assert found.tokens.sum() == 4096
    assert 0 <= float(found.excess.sum()) / 4096 < 1e-6
    assert float(found.law.sum()) == pytest.approx(float(found.nll.sum()), abs=1e-2)
    # The loss itself is off the entropy by sampling noise.
    assert abs(float(found.nll.sum()) / 4096 - stream.entropy) > 1e-4
    other = params | {"output": params["output"] * 0.9}
    assert float(evaluation.evaluate(trainer, other, stream, 4096).excess.sum()) / 4096 > 1e-3


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_batch_depends_on_seed_and_step_alone():
    stream = build(**SHAPE)
    alone = stream.batch(5)
    for step in (0, 6, 2):
        assert not same(stream.batch(step), alone)
    assert same(stream.batch(5), alone)
    assert same(build(**SHAPE).batch(5), alone)
    assert same(batch_of(stream, 5), alone)
    assert not same(build(seed=1, **SHAPE).batch(5), alone)
    assert same(build(seed=1, **SHAPE).with_seed(0).batch(5), alone)


def test_held_out_batches_depend_on_the_seed_of_the_data_alone():
    heldout = build(**SHAPE).heldout(2)
    assert same(build(seed=1, **SHAPE).heldout(2), heldout)
    assert not same(build(**SHAPE).heldout(3), heldout)
    other = build(data_seed=1, **SHAPE)
    assert not same(other.heldout(2), heldout)
    assert same(other.batch(2), build(**SHAPE).batch(2))
    assert not same(build(**SHAPE).batch(2), heldout)
    assert same(jax.jit(lambda s, index: s.heldout(index))(build(**SHAPE), 2), heldout)


def digest(batch):
    return hashlib.sha256(np.stack([batch.inputs, batch.targets]).tobytes()).hexdigest()


def test_another_process_draws_the_same_batch():
    script = (
        "import dataclasses, hashlib, numpy as np\n"
        "from configs import toy\n"
        "from tied_lm.config import build_run\n"
        "from tied_lm.data.toy import ToyStream\n"
        "data = build_run(toy.get_config().to_dict()).data\n"
        "data = dataclasses.replace(data, vocab_size=37, classes=8, batch_size=16, length=32)\n"
        "stream = ToyStream.build(data, 3)\n"
        "for batch in (stream.batch(7), stream.heldout(7)):\n"
        "    print(hashlib.sha256(np.stack([batch.inputs, batch.targets]).tobytes()).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    stream = build(seed=3, **SHAPE)
    assert done.stdout.split() == [digest(stream.batch(7)), digest(stream.heldout(7))]


def test_keys_differ_by_name_and_by_seed():
    keys = [jax.random.key_data(named_key(seed, name)).tolist() for seed in (0, 1, 2**32 - 1) for name in ("a", "b")]
    assert len({tuple(key) for key in keys}) == 6


def test_more_classes_than_tokens_are_refused():
    with pytest.raises(
        ConfigError, match=r"data\.classes = 38 is not possible; allowed: at most data\.vocab_size = 37"
    ):
        build(37, 38)


def test_the_toy_stream_needs_nothing_ahead():
    stream = build()
    assert stream.ahead(3, 100) is stream
    assert stream.heldout_ahead(100) is stream
    assert stream.most_updates == np.inf


def test_toy_tokens_as_text():
    stream = build()
    assert stream.decode(np.array([3, 36])) == "3 36"
    assert stream.encode("3 36") == [3, 36]
    with pytest.raises(ConfigError, match=r"^prompt = '37' is not possible; allowed: ids from 0 to 36"):
        stream.encode("37")


def test_toy_sequences_do_not_go_on():
    with pytest.raises(
        ConfigError, match=r"^data\.order = 'contiguous' .* allowed: random, unless data\.source = 'text'"
    ):
        build(order="contiguous")
