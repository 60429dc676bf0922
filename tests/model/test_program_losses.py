"""Losses in which gathered rows are scored are refused, and ordinary ones are not. Nothing is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.linen import IDS, TARGETS, D, V, cross_entropy
from tied_lm import split_embed_gradients

PARAMS = {"table": jnp.ones((V, D)), "dense": jnp.ones((D, D)), "scale": jnp.ones(D)}
SAMPLE = np.array([3, 1, 4])


def hidden(p):
    return jnp.tanh(p["table"][IDS] @ p["dense"])


def log_sum(p):
    return jax.nn.logsumexp(hidden(p) @ p["table"].T, axis=-1).mean()


def token_by_token(p):
    def add(total, token):
        h, target = token
        return total - (h * p["table"][target]).sum(), None

    return lax.scan(add, log_sum(p), (hidden(p), jnp.asarray(TARGETS)))[0]


SCORED_BY_ROWS = {
    "einsum": lambda p: log_sum(p) - jnp.einsum("bld,bld->bl", hidden(p), p["table"][TARGETS]).mean(),
    "mapped": lambda p: log_sum(p) - jax.vmap(jax.vmap(jnp.dot))(hidden(p), p["table"][TARGETS]).mean(),
    "masked": lambda p: log_sum(p) - jnp.where(TARGETS[..., None] > 3, hidden(p) * p["table"][TARGETS], 0).sum(),
    "one-hot": lambda p: log_sum(p) - (hidden(p) * (jax.nn.one_hot(TARGETS, V) @ p["table"])).sum(),
    "remat": jax.checkpoint(lambda p: log_sum(p) - (hidden(p) * p["table"][TARGETS]).sum()),
    "scan": token_by_token,
    "sampled": lambda p: jax.nn.logsumexp(hidden(p) @ (p["table"][SAMPLE] @ p["dense"]).T, axis=-1).mean(),
    "cosine": lambda p: optax.cosine_similarity(hidden(p)[:, :, None], p["table"][SAMPLE][None, None]).mean(),
    "word2vec": lambda p: -jax.nn.log_sigmoid((p["table"][IDS] * p["table"][TARGETS]).sum(-1)).mean(),
    "of data": lambda p: cross_entropy((np.ones((2, 5, 1, D), np.float32) * p["table"]).sum(-1)),
}


@pytest.mark.parametrize("name", SCORED_BY_ROWS)
def test_rows_that_are_scored_are_refused(name):
    with pytest.raises(ValueError, match=r"cannot be told: (its rows are multiplied|its rows reach|the table meets)"):
        jax.eval_shape(lambda p: split_embed_gradients(SCORED_BY_ROWS[name], p, table="table"), PARAMS)


def recurrent(p):
    """Gates multiply activations, and so do the penalties of the hidden states and of their changes."""

    def cell(carry, x):
        h, memory = carry
        keep, write, give = jnp.split(jax.nn.sigmoid(x @ p["dense"] + h @ p["dense"]), 3, -1)
        memory = keep * memory + write * jnp.tanh(x[:, :2])
        h = jnp.tile(give * jnp.tanh(memory), 3)
        return (h, memory), h

    rows = p["table"][IDS].swapaxes(0, 1)
    h = lax.scan(cell, (jnp.zeros((2, D)), jnp.zeros((2, 2))), rows)[1].swapaxes(0, 1)
    return cross_entropy(h @ p["table"].T) + (h**2).mean() + ((h[:, 1:] - h[:, :-1]) ** 2).mean()


def mixed(p):
    """Experts, whose router has two losses of its own."""
    x = p["table"][IDS]
    chances = jax.nn.softmax(x @ p["dense"])
    chosen = jax.nn.one_hot(chances.argmax(-1), D)
    h = x + sum((chances * chosen)[..., i : i + 1] * jnp.tanh(x @ p["dense"] * i) for i in range(3))
    balance = (chances.mean((0, 1)) * chosen.mean((0, 1))).sum() + (jax.nn.logsumexp(x @ p["dense"]) ** 2).mean()
    return cross_entropy(h @ p["table"].T) + balance


def translated(p):
    """Attention to another text, whose rows are of other ids, and a second head on what was attended to."""
    source = p["table"][TARGETS]
    h = hidden(p)
    h = h + jax.nn.softmax(h @ (source @ p["dense"]).swapaxes(1, 2)) @ source
    h = h * lax.rsqrt((h * h).mean(-1, keepdims=True)) * p["scale"]
    return cross_entropy(h @ p["table"].T) + jax.nn.sigmoid(h[:, 0] @ p["scale"]).mean()


def in_microbatches(p):
    def add(total, batch):
        ids, targets = batch
        logits = jnp.tanh(p["table"][ids] @ p["dense"]) @ p["table"].T
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return total + loss.mean() + (p["table"][ids] ** 2).mean() + jax.nn.logsumexp(logits) ** 2, None

    return lax.scan(add, 0.0, (jnp.asarray(IDS), jnp.asarray(TARGETS)))[0]


@pytest.mark.parametrize("loss_fn", [recurrent, mixed, translated, in_microbatches])
def test_ordinary_losses_are_not(loss_fn):
    found = jax.eval_shape(lambda p: split_embed_gradients(loss_fn, p, table="table"), PARAMS)
    assert {use.kind for use in found.uses} == {"lookup", "scoring"}
