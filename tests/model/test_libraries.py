"""One small tied model in every library, split with one call: against an argument of the loss for each use."""

import equinox as eqx
import flax.nnx as nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen import IDS, D, V, assert_close, cross_entropy, jit
from tied_lm import embed_loss_and_gradients, split_embed_gradients

RNG = np.random.default_rng(0)
TABLE, KERNEL = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((V, D), (D, D)))


def by_use(lookup, scoring, kernel):
    return cross_entropy(jnp.tanh(lookup[IDS] @ kernel) @ scoring.T)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    kernel: jax.Array
    act: object = jnp.tanh
    layers: int = 1

    def __call__(self, ids):
        h = self.act(jax.vmap(self.embed)(ids) @ self.kernel)
        return h @ self.embed.weight.T


def in_equinox():
    model = Model(eqx.nn.Embedding(weight=TABLE), KERNEL)
    return lambda model: cross_entropy(jax.vmap(model)(jnp.asarray(IDS))), model, lambda model: model.embed.weight


def in_haiku():
    def forward(ids):
        embed = hk.Embed(V, D, name="embed")
        h = jnp.tanh(hk.Linear(D, with_bias=False, name="dense")(embed(ids)))
        return h @ embed.embeddings.T

    apply = hk.without_apply_rng(hk.transform(forward)).apply
    params = {"embed": {"embeddings": TABLE}, "dense": {"w": KERNEL}}
    return lambda params: cross_entropy(apply(params, IDS)), params, "embed/embeddings"


def in_nnx():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.dense = nnx.Linear(D, D, use_bias=False, rngs=rngs)
            self.drop = nnx.Dropout(0.0, rngs=rngs)  # whose key is no float

        def __call__(self, ids):
            return self.embed.attend(self.drop(jnp.tanh(self.dense(self.embed(ids)))))

    graph, state = nnx.split(Tied(nnx.Rngs(0)))
    state["embed"]["embedding"][...], state["dense"]["kernel"][...] = TABLE, KERNEL
    return lambda state: cross_entropy(nnx.merge(graph, state)(IDS)), state, "embed/embedding"


@pytest.mark.parametrize("library", [in_equinox, in_haiku, in_nnx])
def test_every_library(library):
    loss_fn, params, table = library()
    found = split_embed_gradients(loss_fn, params, table=table)
    lookup, scoring, kernel = jit(jax.grad(by_use, (0, 1, 2)))(TABLE, TABLE, KERNEL)
    assert_close((found.lookup, found.scoring), (lookup, scoring))
    assert not np.any(found.other)
    loss, gradients, stats = embed_loss_and_gradients(loss_fn, params, table=table)
    assert loss == pytest.approx(float(by_use(TABLE, TABLE, KERNEL)), abs=1e-6)
    of_floats = {x.shape: x for x in jax.tree.leaves(gradients)}
    assert of_floats.keys() == {(V, D), (D, D)}  # what is no float has none
    assert_close((of_floats[V, D], of_floats[D, D]), (lookup + scoring, kernel))
    assert_close(stats.lookup, np.linalg.norm(lookup, axis=-1))
    without_rows = embed_loss_and_gradients(loss_fn, params, table=table, rows=False)
    assert_close(jax.tree.leaves(without_rows[:2]), jax.tree.leaves((loss, gradients)))
