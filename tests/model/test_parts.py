"""Parts of microbatches and devices add up to those of the whole batch; pull, push and counts of somebody's model."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.linen import D, V, assert_close, jit
from tied_lm import (
    TiedEmbedding,
    embed_loss_and_gradients,
    embed_loss_and_parts,
    split_embed_gradients,
    split_gradients,
)
from tied_lm.model.embedding import UntiedEmbedding

RNG = np.random.default_rng(0)
PARAMS = {
    "table": jnp.asarray(RNG.standard_normal((V, D)), jnp.float32),
    "dense": jnp.asarray(RNG.standard_normal((D, D)), jnp.float32) / D,
}
X, Y = (jnp.asarray(RNG.integers(0, V, (8, 5)), jnp.int32) for _ in range(2))
Y = jnp.where(jnp.arange(40).reshape(8, 5) % 7 < jnp.arange(8)[:, None], Y, -1)  # none, some, or all are masked


def loss_of(params, x, y):
    """The mean over the targets that are not masked; NaN if there is none."""
    logits = 3 * jnp.tanh(jnp.tanh(params["table"][x] @ params["dense"]) @ params["table"].T / 3)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 0))
    return jnp.sum(nll * (y >= 0)) / jnp.sum(y >= 0) + 0.01 * jnp.sum(params["table"] ** 2)


def parts_of(params, x, y):
    return embed_loss_and_parts(
        lambda params: loss_of(params, x, y), params, table="table", tokens=(y >= 0).sum(), ids=x, targets=y
    )[2]


def in_scan(params):
    x, y = X.reshape(4, 2, 5), Y.reshape(4, 2, 5)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(parts_of, params, x[0], y[0]))
    return lax.scan(lambda sums, batch: (sums + parts_of(params, *batch), None), zeros, (x, y))[0].stats()


def in_turn(params):
    return sum(
        (parts_of(params, X[k : k + 2], Y[k : k + 2]) for k in (2, 4, 6)), parts_of(params, X[:2], Y[:2])
    ).stats()


def on_devices(params, check_vma=True, devices=4):
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    of_device = jax.shard_map(
        lambda params, x, y: lax.psum(parts_of(params, x, y), "data"),
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    return of_device(params, X, Y).stats()


def whole(params):
    found = embed_loss_and_gradients(lambda params: loss_of(params, X, Y), params, table="table", ids=X, targets=Y)
    return found[2]


@pytest.mark.parametrize("averaged", [in_scan, in_turn])
def test_parts_add_up(averaged):
    assert_close(jit(averaged)(PARAMS), jit(whole)(PARAMS))


def vocabulary_on_devices(params):
    """The rows of the table on 8 devices: each looks up and scores with its own."""

    def loss(table, dense, x, y):
        first = lax.axis_index("rows") * table.shape[0]

        def chosen(values, ids):
            here = (ids >= first) & (ids < first + table.shape[0])
            return here, values(jnp.where(here, ids - first, 0))

        here, rows = chosen(lambda ids: table[ids], x)
        h = jnp.tanh(lax.psum(jnp.where(here[..., None], rows, 0), "rows") @ dense)
        logits = h @ table.T
        highest = lax.stop_gradient(lax.pmax(lax.stop_gradient(logits).max(-1), "rows"))
        log_sum = highest + jnp.log(lax.psum(jnp.exp(logits - highest[..., None]).sum(-1), "rows"))
        here, own = chosen(lambda ids: jnp.take_along_axis(logits, ids[..., None], -1)[..., 0], y)
        return (log_sum - lax.psum(jnp.where(here, own, 0), "rows")).mean()

    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P("rows"), P(), P(), P()), out_specs=P())
    return sharded(params["table"], params["dense"], X, jnp.maximum(Y, 0))


def check_devices():
    """What needs eight of them."""
    assert_close(jit(on_devices)(PARAMS), jit(whole)(PARAMS))
    assert_close(jit(lambda params: on_devices(params, check_vma=False))(PARAMS), jit(whole)(PARAMS))
    with jax.enable_x64(True):
        params = {"table": jnp.asarray(RNG.standard_normal((16, D))), "dense": jnp.asarray(RNG.standard_normal((D, D)))}
        found = split_embed_gradients(vocabulary_on_devices, params, table="table")

        def by_use(lookup, scoring):
            logits = jnp.tanh(lookup[X] @ params["dense"]) @ scoring.T
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(Y, 0)).mean()

        expected = jit(jax.grad(by_use, (0, 1)))(*[params["table"]] * 2)
        assert_close((found.lookup, found.scoring), expected, atol=1e-10)
        assert not np.any(found.other)
        mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        table = jax.device_put(params["table"], jax.NamedSharding(mesh, P("rows")))
        found = split_embed_gradients(lambda p: by_use(p["table"], p["table"]), {"table": table}, table="table")
        assert_close((found.lookup, found.scoring), expected, atol=1e-10)
    check_explicit_shardings()


def check_explicit_shardings():
    """Where shardings are types, as `jax.make_mesh` makes them, the split is that of one device."""
    ids, targets = jnp.asarray(X), jnp.maximum(Y, 0)

    def split_with(params, ids, targets, place):
        def loss_fn(params):
            h = jnp.tanh(params["table"].at[ids].get(out_sharding=place) @ params["dense"])
            logits = jnp.einsum("bld,vd->blv", h, params["table"], out_sharding=place)
            return -jnp.sum(jax.nn.log_softmax(logits) * (jnp.arange(V) == targets[..., None])) / targets.size

        def step(params):
            return embed_loss_and_gradients(loss_fn, params, table="table", ids=ids, targets=targets)

        return jax.device_get((*jit(step)(params), loss_fn(params)))

    *expected, _ = split_with(PARAMS, ids, targets, None)
    explicit = jax.sharding.AxisType.Explicit
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(explicit,))):
        *found, plain = split_with(
            jax.device_put(PARAMS, P()), *jax.device_put((ids, targets), P("data")), P("data", None, None)
        )
    assert_close(tuple(found), tuple(expected))
    np.testing.assert_allclose(found[0], plain, rtol=1e-6)


@pytest.mark.slow
def test_devices():
    settings = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    code = "from tests.model.test_parts import check_devices; check_devices()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=settings, check=True, timeout=300)


@pytest.mark.parametrize("tied", [True, False])
def test_pull_push_and_counts_are_those_of_this_projects_own_model(tied):
    own = TiedEmbedding(V, D) if tied else UntiedEmbedding(V, D)
    params = {"embedding": PARAMS["table"] / 2} | ({} if tied else {"output": jnp.cos(PARAMS["table"])})
    x, y = X, jnp.maximum(Y, 0)

    @jax.checkpoint
    def loss_fn(params):
        logits = params["embedding"][x] @ params["embedding" if tied else "output"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    head = None if tied else "output"
    found = split_embed_gradients(loss_fn, params, table="embedding", head=head, ids=x, targets=y)
    expected = jit(split_gradients, static_argnums=0)(own, params, x, y)
    for part in ("loss", "lookup", "scoring", "pull", "push", "total"):
        assert_close(getattr(found, part), getattr(expected, part))
    step = jit(lambda p: embed_loss_and_gradients(loss_fn, p, table="embedding", head=head, ids=x, targets=y))
    loss, gradients, stats = step(params)
    assert_close((loss, gradients), jit(jax.value_and_grad(loss_fn))(params))
    assert stats.input_count.tolist() == np.bincount(x.ravel(), minlength=V).tolist()
    assert stats.target_count.tolist() == np.bincount(y.ravel(), minlength=V).tolist()
    assert_close(stats.pull, np.linalg.norm(expected.pull, axis=-1))


def scores_twice(params):
    return loss_of(params, X, Y) + loss_of(params, Y, X)


def scores_in_a_loop(params):
    return lax.map(lambda ids: jnp.tanh(params["table"][ids]) @ params["table"].T, X).sum()


def scores_all(params):
    return (params["table"][X] @ params["table"].T).sum()


@pytest.mark.parametrize(
    ("loss_fn", "targets", "why"),
    [
        (scores_twice, Y, "targets= needs one product that scores, and there are 2: scoring: dot_general"),
        (scores_in_a_loop, Y, "targets= needs one product that scores; scoring: dot_general .* is inside of a scan"),
        (scores_all, Y[:, 1:], r"targets has shape \(8, 4\), and the scoring.* has hidden states \(8, 5\) and 11 rows"),
        (scores_all, Y / 2, "targets is of float32, not an array of integers"),
        (scores_all, None, "ids= and targets= are given together"),
    ],
)
@pytest.mark.untyped
def test_targets_that_cannot_be_matched(loss_fn, targets, why):
    with pytest.raises(ValueError, match=why):
        split_embed_gradients(loss_fn, PARAMS, table="table", ids=X, targets=targets)
