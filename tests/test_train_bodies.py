"""Training of models that draw dropout masks or carry a state from batch to batch."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tied_lm.gradients import backward, tables
from tied_lm.loop import Interrupted
from tied_lm.streams import named_key
from tied_lm.train import build_model, build_stream

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
        plain, _ = loss(batch, key, carry, False)
        expected, carry = loss(batch, key, carry, True)
        state, _ = trainer.advance(state, ahead, np.int32(1), tiny.slots(trainer, []), True)
        assert float(state.window.loss) == pytest.approx(float(expected), rel=1e-5)
        assert abs(float(expected) - float(plain)) > 1e-2
        state = dataclasses.replace(state, params=jax.tree.map(jnp.asarray, params))
    heldout = stream.heldout_ahead(40)
    exact, _ = loss(heldout.heldout(0), key, {}, False)
    assert float(trainer.evaluate(params, heldout, 40).nll.sum()) == pytest.approx(40 * float(exact), rel=1e-5)


def whole(model, params, inputs):
    """Hidden vectors and carry of one pass over whole sequences."""
    apply = partial(model.apply, method="hidden", mutable=["carry"])
    (h, scoring), changed = jax.jit(apply)({"params": params}, inputs)
    return h @ scoring.T, changed["carry"]


def test_training_carries_the_state_over_contiguous_text(tmp_path):
    """At a rate at which nothing moves, the state is that of one pass over the text so far."""
    fields = ("body.dropout=0.0", "optimizer.name=sgd", "optimizer.learning_rate=1e-30")
    config = tiny.sequences(tmp_path, STATEFUL, *fields)
    state, ahead = advance(config, [1, 3]), build_stream(config).ahead(0, 4)
    inputs = np.concatenate([ahead.batch(jnp.int32(step)).inputs for step in range(4)], axis=1)
    _, carry = whole(build_model(config), state.params, inputs)
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(carry))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8), state.carry, carry)


def test_evaluation_carries_the_state_over_contiguous_text(tmp_path):
    config = tiny.sequences(tmp_path, STATEFUL)
    trainer, stream, model = tiny.trainer_of(config), build_stream(config), build_model(config)
    params = advance(config, [39]).params
    heldout = stream.heldout_ahead(80)
    batches = [heldout.heldout(jnp.int32(i)) for i in range(2)]
    inputs, targets = (np.concatenate([batch[field] for batch in batches], axis=1) for field in (0, 1))
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    logits, _ = whole(model, params, inputs)
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], axis=-1)
    evaluated = np.asarray(trainer.evaluate(params, heldout, 80).nll).reshape(2, -1).sum(axis=1)
    for found, part in zip(evaluated, np.split(nll, 2, axis=1), strict=True):
        assert float(found) == pytest.approx(float(part.sum()), rel=1e-5)
    fresh, _ = whole(model, params, inputs[:, 5:])
    without = -np.take_along_axis(np.asarray(jax.nn.log_softmax(fresh)), targets[:, 5:, None], axis=-1).sum()
    assert abs(float(evaluated[1]) - float(without)) > 1e-3


def test_the_probe_carries_the_state_over_contiguous_text(tmp_path):
    config = tiny.sequences(tmp_path, STATEFUL)
    trainer, model = tiny.trainer_of(config), build_model(config)
    params, heldout = advance(config, [39]).params, build_stream(config).heldout_ahead(80)
    split = jax.jit(partial(backward, model, params))
    found, carry = [], {}
    for index in range(2):
        b = split(*heldout.heldout(jnp.int32(index))[:2], carry=carry)
        found, carry = [*found, tables(b).expected - tables(b).data], b.carry
    expected = np.linalg.norm(np.mean(found, axis=0), axis=-1)
    np.testing.assert_allclose(trainer.probe(params, heldout, 80).stats.scoring, expected, rtol=1e-4, atol=1e-7)
