"""Tokens drawn from a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests import tiny
from tied_lm import TiedEmbedding
from tied_lm.sampling import first_tokens, sample
from tied_lm.train import build_model

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
