"""Updates against the rules written out in NumPy."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from configs import toy
from tied_lm import optimizer
from tied_lm.config import build_run

CONSTANT = dataclasses.replace(
    build_run(toy.get_config().to_dict()).optimizer,
    schedule="constant",
    warmup_steps=0,
    learning_rate=0.1,
    beta1=0.8,
    beta2=0.95,
)


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((3, 2)).astype(np.float32) for name in ("embedding", "output", "body")}


@pytest.fixture
def gradients():
    """Those of three updates, of norms about 2.4, 0.24 and 24."""
    rng = np.random.default_rng(1)
    names = ("embedding", "output", "body")
    return [{n: (size * rng.standard_normal((3, 2))).astype(np.float32) for n in names} for size in (1, 0.1, 10)]


def run(config, params, gradients, steps=100, vocabulary=("embedding", "output")):
    """The parameters after the updates."""
    rule = optimizer.build(config, steps, vocabulary)
    state, update = rule.init(params), jax.jit(rule.update)
    for gradient in gradients:
        changes, state = update(gradient, state, params)
        params = optax.apply_updates(params, changes)
    return params


def by_hand(config, params, gradients, direction, decay=None, clip=0.0, rate=None):
    """The same in float64. `direction` maps the moments, the gradient and the count of updates to a step."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    moments = dict.fromkeys(params, (0.0, 0.0))
    for count, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradient.values()))
        scale = min(1, clip / norm) if clip else 1
        for name, value in params.items():
            step, moments[name] = direction(config, *moments[name], gradient[name] * scale, count)
            step = step + (decay or {}).get(name, 0) * value
            params[name] = value - (rate(count - 1) if rate else config.learning_rate) * step
    return params


def adam(config, m, v, g, count):
    m, v = config.beta1 * m + (1 - config.beta1) * g, config.beta2 * v + (1 - config.beta2) * g**2
    return m / (1 - config.beta1**count) / (np.sqrt(v / (1 - config.beta2**count)) + 1e-8), (m, v)


def sgd(config, m, v, g, count):
    return g, (m, v)


def momentum(config, m, v, g, count):
    m = config.beta1 * m + g
    return m, (m, v)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


DECAY = {"weight_decay": 0.3, "vocab_weight_decay": 0.7}


@pytest.mark.parametrize(("name", "direction"), [("adam", adam), ("sgd", sgd), ("momentum", momentum)])
@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_rules_without_decay(params, gradients, name, direction, clip):
    # The decay is that of adamw alone; a config with another rule cannot ask for it.
    config = dataclasses.replace(CONSTANT, name=name, clip_norm=clip, **DECAY)
    assert_equal(run(config, params, gradients), by_hand(config, params, gradients, direction, clip=clip))


@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_adamw_decays_vocabulary_and_body_each_at_its_own_rate(params, gradients, clip):
    config = dataclasses.replace(CONSTANT, name="adamw", clip_norm=clip, **DECAY)
    decay = {"embedding": 0.7, "output": 0.7, "body": 0.3}
    assert_equal(run(config, params, gradients), by_hand(config, params, gradients, adam, decay, clip))


def test_a_tied_matrix_is_decayed_once_and_as_fast_as_an_untied_one(params, gradients):
    config = dataclasses.replace(CONSTANT, name="adamw", **DECAY)
    none = jax.tree.map(np.zeros_like, gradients[0])
    tied = run(config, {"embedding": params["embedding"]}, [{"embedding": none["embedding"]}], 100, ("embedding",))
    np.testing.assert_allclose(tied["embedding"], params["embedding"] * (1 - 0.1 * 0.7), rtol=1e-6)
    untied = run(config, params, [none])
    for name in ("embedding", "output"):
        np.testing.assert_allclose(untied[name], params[name] * (1 - 0.1 * 0.7), rtol=1e-6)
    np.testing.assert_allclose(untied["body"], params["body"] * (1 - 0.1 * 0.3), rtol=1e-6)


def test_the_decay_of_a_body_reaches_every_leaf():
    params = {"embedding": np.ones((2, 2), np.float32), "body": {"up": {"kernel": np.ones((2, 2), np.float32)}}}
    config = dataclasses.replace(CONSTANT, name="adamw", weight_decay=0.5)
    after = run(config, params, [jax.tree.map(np.zeros_like, params)], vocabulary=("embedding",))
    np.testing.assert_array_equal(after["embedding"], 1)
    np.testing.assert_allclose(after["body"]["up"]["kernel"], 0.95, rtol=1e-6)


def test_a_gradient_within_the_limit_is_not_clipped(params, gradients):
    free, loose = (dataclasses.replace(CONSTANT, name="sgd", clip_norm=c) for c in (0.0, 1e3))
    jax.tree.map(np.testing.assert_array_equal, run(free, params, gradients), run(loose, params, gradients))


def test_each_update_has_the_rate_of_its_step(params, gradients):
    config = dataclasses.replace(CONSTANT, name="adamw", warmup_steps=2, **DECAY)
    decay = {"embedding": 0.7, "output": 0.7, "body": 0.3}
    expected = by_hand(config, params, gradients, adam, decay, rate=lambda k: 0.1 * (k + 1) / 3)
    assert_equal(run(config, params, gradients), expected)


def rates(steps, **fields):
    rate = optimizer.learning_rate(dataclasses.replace(CONSTANT, learning_rate=1.0, **fields), steps)
    return [float(rate(np.int32(step))) for step in range(steps)]


def test_constant_rates():
    assert rates(4) == [1, 1, 1, 1]
    assert rates(5, warmup_steps=3) == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1])
    assert rates(2, warmup_steps=3) == pytest.approx([1 / 4, 2 / 4])


def test_cosine_rates():
    def cosine(part):
        return (1 + np.cos(np.pi * part)) / 2

    assert rates(4, schedule="cosine") == pytest.approx([1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)], abs=1e-6)
    expected = [1 / 3, 2 / 3, 1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)]
    assert rates(6, schedule="cosine", warmup_steps=2) == pytest.approx(expected, abs=1e-6)
    # A run that is all warm-up.
    assert rates(3, schedule="cosine", warmup_steps=3) == pytest.approx([1 / 4, 2 / 4, 3 / 4])


def test_rates_that_rise_stay_and_fall():
    expected = [1 / 3, 2 / 3, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]
    assert rates(8, schedule="wsd", warmup_steps=2, decay_steps=4) == pytest.approx(expected)
    assert rates(4, schedule="wsd", decay_steps=4) == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4])
    assert rates(4, schedule="wsd", warmup_steps=1) == pytest.approx([1 / 2, 1, 1, 1])
    assert rates(4, schedule="wsd", warmup_steps=2, decay_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 1 / 2])
