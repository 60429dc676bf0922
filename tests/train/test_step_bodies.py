"""Training of models that draw dropout masks or carry a state from batch to batch."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tied_lm.data.stream import named_key
from tied_lm.model.split import backward, tables
from tied_lm.train import evaluation
from tied_lm.train.build import build_model, build_stream
from tied_lm.train.loop import Interrupted

NAMES = list(tiny.SEQUENCE_ARMS)
STATEFUL = "stateful lstm, dropout, coupled adam"


@pytest.fixture(params=NAMES)
def config(request, tmp_path):
    return tiny.sequences(tmp_path, request.param)


def advance(config, lengths):
    """The state after dispatches of the given lengths."""
    trainer, stream = tiny.trainer_of(config), build_stream(config)
    state, step = trainer.init(np.uint32(config.seed)), 0
    for length in lengths:
        ahead = stream.ahead(step, length)
        state, _ = trainer.advance(state, ahead, np.int32(length), tiny.slots(trainer, []), step == 0)
        step += length
    return state


def whole(model, params, inputs):
    """Hidden vectors and carry of one pass over whole sequences."""
    apply = partial(model.apply, method="hidden", mutable=["carry"])
    (h, scoring), changed = jax.jit(apply)({"params": params}, inputs)
    return h @ scoring.T, changed.get("carry", {})


def test_the_cut_into_dispatches_changes_no_bit(config):
    expected = advance(config, [1] * 39)
    for lengths in ([7] * 5 + [4], [39]):
        tiny.assert_same_bits(advance(config, lengths), expected)


def test_a_stop_changes_no_bit(config, tmp_path):
    tiny.train(tmp_path / "whole", config)
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "run", config, stop_after=13)
    tiny.train(tmp_path / "run", config)
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole", config)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_that_of_its_seed_and_step_and_for_training_alone(name, tmp_path):
    config = tiny.sequences(tmp_path, name, "seed=3", "model.init_std=1.0")
    trainer, stream, model = tiny.trainer_of(config), build_stream(config), build_model(config)
    state, carry = trainer.init(np.uint32(3)), {}
    params = jax.device_get(state.params)

    @partial(jax.jit, static_argnames="train")
    def loss(batch, key, carry, train):
        b = backward(model, params, *batch[:2], carry=carry, rngs={"dropout": key}, train=train)
        return b.loss, b.carry

    for step in (0, 1):
        ahead = stream.ahead(step, 1)
        batch, key = ahead.batch(jnp.int32(step)), jax.random.fold_in(named_key(3, "dropout"), step)
        carry = jax.tree.map(lambda leaf, fresh=batch.fresh: leaf * ~fresh[:, None], carry)
        plain, _ = loss(batch, key, carry, False)
        expected, carry = loss(batch, key, carry, True)
        state, _ = trainer.advance(state, ahead, np.int32(1), tiny.slots(trainer, []), True)
        assert float(state.window.loss) == pytest.approx(float(expected), rel=1e-5)
        assert abs(float(expected) - float(plain)) > 1e-2
        state = dataclasses.replace(state, params=jax.tree.map(jnp.asarray, params))
    heldout = stream.heldout_ahead(40)
    carry = {} if heldout.warm_up is None else whole(model, params, heldout.warm_up)[1]
    exact, _ = loss(heldout.heldout(0), key, carry, False)
    assert float(evaluation.evaluate(trainer, params, heldout, 40).nll.sum()) == pytest.approx(
        40 * float(exact), rel=1e-5
    )


ROUND = 103 // 5  # windows of the training text
FROZEN = ("body.dropout=0.0", "optimizer.name=sgd", "optimizer.learning_rate=1e-30", "model.init_std=1.0")


@pytest.mark.parametrize("lengths", [[1, 3], [9, 24]])
def test_training_carries_the_state_to_the_end_of_the_text(lengths, tmp_path):
    """At a rate at which nothing moves, each lane's state is that of one pass over the text since it was at the end."""
    config = tiny.sequences(tmp_path, STATEFUL, *FROZEN)
    steps, stream = sum(lengths), build_stream(config)
    assert stream.corpus.train.size == 104
    state, ahead = advance(config, lengths), stream.ahead(0, steps)
    batches = [ahead.batch(jnp.int32(step)) for step in range(steps)]
    model = build_model(config)
    for lane in range(8):
        inputs: list[int] = []
        for batch in batches:
            # The letters are the alphabet again and again: the text ends where the next one is not the next there.
            if inputs and (int(batch.inputs[lane, 0]) - inputs[-1]) % 26 != 1:
                inputs = []
            inputs += np.asarray(batch.inputs[lane]).tolist()
        _, carry = whole(model, state.params, np.array([inputs]))
        found = jax.tree.map(lambda leaf, lane=lane: leaf[lane : lane + 1], state.carry)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found, carry)
        assert len(inputs) < 5 * steps or steps < ROUND


def expected_lanes(stream):
    """The held-out letters of each lane, in windows of 5: those that warm the state up, then those that are scored."""
    size = stream.corpus.heldout.size
    text = np.asarray(stream.corpus.heldout.read(0, size))
    windows = (size - 1) // 5
    each = (windows - 1) // 8
    return [text[5 * each * lane : 5 * (each * (lane + 1) + 1) + 1] for lane in range(8)]


def test_evaluation_starts_from_a_warm_state_and_carries_it(tmp_path):
    config = tiny.sequences(tmp_path, STATEFUL, "model.init_std=1.0")
    trainer, stream, model = tiny.trainer_of(config), build_stream(config), build_model(config)
    params = advance(config, [39]).params
    assert stream.heldout_tokens == 80  # of 2 windows for each of 8 lanes
    found = (
        np.asarray(evaluation.evaluate(trainer, params, stream.heldout_ahead(80), 80).nll).sum(axis=-1).reshape(2, 8)
    )
    for lane, tokens in enumerate(expected_lanes(stream)):
        assert tokens.size == 16
        logits, _ = whole(model, params, np.asarray(tokens[None, :-1], np.int32))
        nll = -np.asarray(jax.nn.log_softmax(logits[0]))[np.arange(15), tokens[1:]]
        np.testing.assert_allclose(found[:, lane], nll[5:].reshape(2, 5).sum(axis=1), rtol=1e-5)
        cold, _ = whole(model, params, np.asarray(tokens[None, 5:-1], np.int32))
        from_zeros = -np.asarray(jax.nn.log_softmax(cold[0]))[np.arange(10), tokens[6:]]
        assert abs(from_zeros[:5].sum() - found[0, lane]) > 1e-3


def test_the_probe_starts_from_a_warm_state_and_carries_it(tmp_path):
    config = tiny.sequences(tmp_path, STATEFUL)
    trainer, stream, model = tiny.trainer_of(config), build_stream(config), build_model(config)
    params, heldout = advance(config, [39]).params, stream.heldout_ahead(80)
    split = jax.jit(partial(backward, model, params))
    warm_up = np.stack([tokens[:5] for tokens in expected_lanes(stream)]).astype(np.int32)
    found, carry = [], whole(model, params, warm_up)[1]
    for index in range(2):
        b = split(*heldout.heldout(jnp.int32(index))[:2], carry=carry)
        found, carry = [*found, tables(b).expected - tables(b).data], b.carry
    expected = np.linalg.norm(np.mean(found, axis=0), axis=-1)
    np.testing.assert_allclose(
        evaluation.probe(trainer, params, heldout, 80)[0].stats.scoring, expected, rtol=1e-4, atol=1e-7
    )
