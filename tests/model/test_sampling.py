"""Tokens drawn from a model."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests import tiny
from tied_lm import TiedEmbedding
from tied_lm.model.sampling import first_tokens, sample
from tied_lm.train.build import build_model

V, D = 6, 3
MODEL = TiedEmbedding(V, D)
W = np.random.default_rng(0).normal(size=(V, D))
PARAMS = {"embedding": jnp.asarray(W, jnp.float32)}
KEY = jax.random.key(0)


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def next_tokens(start, count, **how):
    prompts = jnp.full((count, 1), start, jnp.int32)
    return np.asarray(sample(MODEL, PARAMS, prompts, 1, KEY, **how))[:, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature):
    count = 20_000
    for start in (0, 4):
        found = np.bincount(next_tokens(start, count, temperature=temperature), minlength=V)
        expected = softmax(W @ W[start] / temperature) * count
        assert stats.chisquare(found, expected).pvalue > 1e-3


def test_top_k_draws_among_the_likeliest_alone():
    count = 20_000
    logits = W @ W[2]
    best = np.argsort(-logits)[:3]
    found = np.bincount(next_tokens(2, count, top_k=3), minlength=V)
    assert set(np.flatnonzero(found)) == set(best)
    assert stats.chisquare(found[best], softmax(logits[best]) * count).pvalue > 1e-3


def greedy_by_hand(start, length):
    tokens = [start]
    for _ in range(length):
        tokens.append(int(np.argmax(W @ W[tokens[-1]])))
    return tokens


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-6}, {"temperature": 1e-44}])
def test_a_vanishing_temperature_and_one_likeliest_token_are_greedy(how):
    prompts = jnp.arange(V, dtype=jnp.int32)[:, None]
    found = np.asarray(sample(MODEL, PARAMS, prompts, 5, KEY, **how))
    assert found.tolist() == [greedy_by_hand(start, 5) for start in range(V)]


def test_of_equals_the_first_is_taken():
    flat = {"embedding": jnp.ones((V, D))}
    for how in ({"temperature": 0.0}, {"top_k": 1}):
        assert np.asarray(sample(MODEL, flat, jnp.array([[3]]), 4, KEY, **how)).tolist() == [[3, 0, 0, 0, 0]]


def test_the_key_decides_and_the_prompt_stays():
    prompts = jnp.array([[1, 2, 3]] * 4)
    one, again, other = (
        np.asarray(sample(MODEL, PARAMS, prompts, 8, jax.random.key(k), temperature=3.0)) for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert one[:, :3].tolist() == [[1, 2, 3]] * 4
    assert len({tuple(row) for row in one.tolist()}) == 4


BODIES = [
    ("none",),
    ("lstm", "body.stateful=true", "data.source=text", "data.order=contiguous"),
    ("transformer", "body.heads=2", "model.init_std=1", "model.tying=soft_cap"),
]


@pytest.mark.parametrize(("body", "options"), [(body, options) for body, *options in BODIES])
def test_each_token_is_scored_with_what_is_before_it(body, options):
    model = build_model(tiny.make_config(f"model.body={body}", *options))
    params = model.init(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))["params"]
    tokens = np.asarray(sample(model, params, jnp.array([[7, 3]]), 6, KEY, temperature=0.0))[0]
    # The model is given all tokens at once here, and saw zeros for those to come there.
    logits = model.apply({"params": params}, jnp.asarray(tokens[None]))[0]
    np.testing.assert_array_equal(tokens[2:], jnp.argmax(logits, axis=-1)[1:-1])


def test_first_tokens_follow_their_frequency():
    frequencies = np.array([0.5, 0.0, 0.2, 0.3])
    found = np.bincount(np.asarray(first_tokens(frequencies, 10_000, KEY))[:, 0], minlength=4)
    assert found[1] == 0
    assert stats.chisquare(found[[0, 2, 3]], frequencies[[0, 2, 3]] * 10_000).pvalue > 1e-3


CAUSAL = tiny.make_config("model.body=transformer", "body.heads=2", "model.init_std=1", "model.tying=soft_cap")


@functools.partial(jax.jit, static_argnames="model")
def full_logits(model, params, tokens_T):
    return model.apply({"params": params}, tokens_T[None])[0]


@pytest.mark.parametrize(("window", "prompt"), [(5, [7, 3]), (3, [7, 3, 1, 2, 9]), (100, [7, 3, 1])])
def test_each_token_is_scored_with_a_window_before_it(window, prompt):
    model = build_model(CAUSAL)
    params = model.init(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))["params"]
    draw = np.random.default_rng(0)
    params["body"] = jax.tree.map(
        lambda p: p + 0.3 * draw.standard_normal(p.shape).astype(np.float32), jax.device_get(params["body"])
    )
    found = np.asarray(sample(model, params, jnp.array([prompt]), 9, KEY, temperature=0.0, window=window))[0].tolist()
    expected = list(prompt)
    for _ in range(9):
        before = expected[-window:]
        logits = full_logits(model, params, np.array(before + [0] * (14 - len(before))))
        expected.append(int(np.argmax(logits[len(before) - 1])))
    assert found == expected


def shapes_in(jaxpr):
    """Of all arrays in a program."""
    for equation in jaxpr.eqns:
        yield from (tuple(v.aval.shape) for v in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from shapes_in(inner)


def test_no_position_beyond_the_window_is_met_and_one_is_scored():
    config = tiny.make_config("model.body=transformer", "body.heads=2")
    model = build_model(config)
    params = model.init(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))["params"]
    program = jax.make_jaxpr(lambda p, x: sample(model, p, x, 30, KEY, 0.7, 4, window=5))(
        params, jnp.zeros((3, 2), jnp.int32)
    )
    shapes = set(shapes_in(program.jaxpr))
    assert (3, 20) in shapes  # logits
    assert (3, 5, 4) in shapes  # hidden vectors
    assert not [shape for shape in shapes if len(shape) > 2 and 20 in shape]
    # Of all 32 positions there are the ids alone.
    assert {shape for shape in shapes if 32 in shape or 31 in shape} == {(3, 32)}
