"""Updates against the rules written out in NumPy."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from configs import toy
from tied_lm.config import build_run
from tied_lm.train import optimizer

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
    rule = optimizer.build(config, steps, vocabulary, scoring=vocabulary[-1:])
    state, update = rule.init(params), jax.jit(rule.update)
    for gradient in gradients:
        changes, state = update(gradient, state, params)
        params = optax.apply_updates(params, changes)
    return params


def by_hand(config, params, gradients, direction, decay=None, clip=0.0, rate=None):
    """The same in float64. `direction` maps the moments, the gradient and the count of updates to a step, or is a
    dict of such by name; `rate` maps the count to the learning rate, or is a dict of constant rates by name."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    moments = dict.fromkeys(params, (0.0, 0.0))
    for count, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradient.values()))
        scale = min(1, clip / norm) if clip else 1
        for name, value in params.items():
            of_name = direction[name] if isinstance(direction, dict) else direction
            step, moments[name] = of_name(config, *moments[name], gradient[name] * scale, count)
            step = step + (decay or {}).get(name, 0) * value
            of_name = rate[name] if isinstance(rate, dict) else rate(count - 1) if rate else config.learning_rate
            params[name] = value - of_name * step
    return params


def adam_of_squares(config, m, v, g, squares, count):
    m, v = config.beta1 * m + (1 - config.beta1) * g, config.beta2 * v + (1 - config.beta2) * squares
    return m / (1 - config.beta1**count) / (np.sqrt(v / (1 - config.beta2**count)) + 1e-8), (m, v)


def adam(config, m, v, g, count):
    return adam_of_squares(config, m, v, g, g**2, count)


def coupled_adam(config, m, v, g, count):
    return adam_of_squares(config, m, v, g, np.mean(g**2, axis=0, keepdims=True), count)


def muon(config, m, v, g, count):
    """Nesterov's momentum, with the bias of its mean corrected, through five steps of Newton-Schulz (Keller Jordan's
    coefficients); then of the size that Liu et al. 2025 give it."""
    b = config.beta1
    m = b * m + (1 - b) * g
    x = b * m / (1 - b ** (count + 1)) + (1 - b) * g / (1 - b**count)
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return 0.2 * np.sqrt(max(x.shape)) * x, (m, v)


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


RULES = {
    "adam": adam,
    "sgd": sgd,
    "momentum": momentum,
    "muon": {"embedding": adam, "output": adam, "body": muon},
    "coupled_adam": {"embedding": adam, "output": coupled_adam, "body": adam},  # what looks up alone is not coupled
}


@pytest.mark.parametrize(("name", "direction"), RULES.items(), ids=RULES)
@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_rules_without_decay(params, gradients, name, direction, clip):
    # The decay is that of adamw and muon alone; a config with another rule cannot ask for it.
    decay = {} if name == "muon" else DECAY
    config = dataclasses.replace(CONSTANT, name=name, clip_norm=clip, **decay)
    assert_equal(run(config, params, gradients), by_hand(config, params, gradients, direction, clip=clip))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_vocabulary_and_body_decay_each_at_its_own_rate(params, gradients, name, clip):
    config = dataclasses.replace(CONSTANT, name=name, clip_norm=clip, **DECAY)
    decay = {"embedding": 0.7, "output": 0.7, "body": 0.3}
    expected = by_hand(config, params, gradients, RULES.get(name, adam), decay, clip)
    assert_equal(run(config, params, gradients), expected)


@pytest.mark.parametrize("name", ["adamw", *RULES])
def test_the_vocabulary_has_a_rate_of_its_own(params, gradients, name):
    decay = DECAY if name in ("adamw", "muon") else {}
    config = dataclasses.replace(CONSTANT, name=name, vocab_learning_rate=0.02, clip_norm=1.5, **decay)
    rate = {"embedding": 0.02, "output": 0.02, "body": 0.1}
    decay = {"embedding": 0.7, "output": 0.7, "body": 0.3} if decay else {}
    expected = by_hand(config, params, gradients, RULES.get(name, adam), decay, 1.5, rate)
    assert_equal(run(config, params, gradients), expected)


def test_the_rate_of_the_vocabulary_follows_the_schedule(params, gradients):
    config = dataclasses.replace(CONSTANT, name="sgd", vocab_learning_rate=0.4, warmup_steps=2)
    expected = by_hand(config, params, gradients, sgd, rate=lambda k: 0.1 * (k + 1) / 3)
    fast = by_hand(config, params, gradients, sgd, rate=lambda k: 0.4 * (k + 1) / 3)
    assert_equal(run(config, params, gradients), {**fast, "body": expected["body"]})


MODEL = {
    "embedding": np.ones((5, 4)),
    "factor": np.ones((5, 2)),
    "projection": np.ones((4, 4)),
    "body": {"up": {"kernel": np.ones((4, 7)), "bias": np.ones(7)}, "filter": np.ones((2, 4, 3))},
}
NAMES = ("embedding", "factor")


def model_gradients(count):
    rng = np.random.default_rng(2)
    return [jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32), MODEL) for _ in range(count)]


def flat(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves(tree)}


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def test_muon_is_for_the_matrices_of_the_body_and_for_nothing_else():
    params, gradients = jax.tree.map(np.float32, MODEL), model_gradients(3)
    config = dataclasses.replace(CONSTANT, name="muon")
    found = flat(run(config, params, gradients, vocabulary=NAMES))
    direction = dict.fromkeys(found, adam) | {"body.up.kernel": muon}
    assert_equal(found, by_hand(config, flat(params), [flat(g) for g in gradients], direction))


def test_muon_brings_singular_values_near_one_and_entries_to_the_size_of_adams():
    config = dataclasses.replace(CONSTANT, name="muon", learning_rate=1.0)
    rng = np.random.default_rng(0)
    params = {name: np.zeros((64, 256), np.float32) for name in ("embedding", "body")}
    gradient = {name: rng.standard_normal((64, 256)).astype(np.float32) for name in params}
    found = run(config, params, [gradient])
    values = np.linalg.svd(found["body"] / (0.2 * 256**0.5), compute_uv=False)
    assert 0.6 < values.min() < values.max() < 1.3
    assert np.sqrt(np.mean(found["body"] ** 2)) == pytest.approx(0.2, rel=0.2)
    np.testing.assert_allclose(np.abs(found["embedding"]), 1, rtol=1e-3)  # Adam


def state_bytes(name, params, vocabulary):
    state = optimizer.build(dataclasses.replace(CONSTANT, name=name), 9, vocabulary, vocabulary).init(params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_coupled_adam_keeps_one_second_moment_for_all_rows():
    params = jax.tree.map(np.float32, MODEL)
    saved = 4 * (5 * 4 + 5 * 2 - (4 + 2))
    assert state_bytes("adam", params, NAMES) - state_bytes("coupled_adam", params, NAMES) == saved


OPTIMIZERS = ["adam", "adamw", "sgd", "momentum", "muon", "coupled_adam"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_of_arrays_that_stand_under_the_names_of_the_parameters(name):
    """So it can be saved, and what belongs to one parameter can be found."""
    params = jax.tree.map(np.float32, MODEL)
    rule = optimizer.build(dataclasses.replace(CONSTANT, name=name, vocab_learning_rate=0.1), 9, NAMES, NAMES)
    state = rule.init(params)
    _, after = jax.jit(rule.update)(params, state, params)
    for tree in (state, after):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    signatures = [[(leaf.shape, leaf.dtype, leaf.weak_type) for _, leaf in leaves(tree)] for tree in (state, after)]
    assert signatures[0] == signatures[1]  # or every second dispatch would be compiled again
    moments = {"sgd": 0, "momentum": 1}.get(name, 2)
    for parameter in NAMES:
        shapes = [
            leaf.shape for path, leaf in leaves(after) if jax.tree_util.DictKey(parameter) in path and np.any(leaf)
        ]
        assert len(shapes) == moments
        rows = params[parameter].shape
        assert set(shapes) <= ({rows, rows[1:]} if name == "coupled_adam" else {rows})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tied_matrix_is_stepped_once(params, gradients, name):
    """As the matrix that scores in a model with more of them, given the same gradient."""
    config = dataclasses.replace(CONSTANT, name=name, vocab_learning_rate=0.03)
    only = [{"embedding": gradient["output"]} for gradient in gradients]
    with jax.disable_jit():  # compiled, the two differ by rounding
        tied = run(config, {"embedding": params["output"]}, only, vocabulary=("embedding",))
        untied = run(config, params, gradients)
    np.testing.assert_array_equal(tied["embedding"], untied["output"])


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


def test_cosine_rates():
    def cosine(part):
        return (1 + np.cos(np.pi * part)) / 2

    assert rates(4, schedule="cosine") == pytest.approx([1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)], abs=1e-6)
    expected = [1 / 3, 2 / 3, 1, cosine(1 / 4), cosine(2 / 4), cosine(3 / 4)]
    assert rates(6, schedule="cosine", warmup_steps=2) == pytest.approx(expected, abs=1e-6)


def test_rates_that_rise_stay_and_fall():
    expected = [1 / 3, 2 / 3, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]
    assert rates(8, schedule="wsd", warmup_steps=2, decay_steps=4) == pytest.approx(expected)
    assert rates(4, schedule="wsd", decay_steps=4) == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4])
    assert rates(4, schedule="wsd", warmup_steps=2, decay_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 1 / 2])


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup_steps": 8},
        {"schedule": "cosine", "warmup_steps": 8},
        {"schedule": "cosine"},
        {"schedule": "wsd", "warmup_steps": 4, "decay_steps": 5},
    ],
)
def test_the_highest_rate_is_that_of_an_update(fields):
    config = dataclasses.replace(CONSTANT, **fields)
    assert optimizer.highest_rate(config, 9) == pytest.approx(0.1, rel=1e-6)
    # A run of an older version, which was cut short in its warm-up.
    cut = dataclasses.replace(CONSTANT, warmup_steps=8)
    assert optimizer.highest_rate(cut, 4) == pytest.approx(0.1 * 4 / 9, rel=1e-6)
