"""Looked-up rows that are kept token by token, against the dense tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tied_lm import embed_loss_and_gradients, split_embed_gradients
from tied_lm.model import tokenrows

V, D = 40, 6
RNG = np.random.default_rng(3)
IDS, OTHERS = (jnp.asarray(RNG.integers(0, 12, shape)) for shape in ((3, 4), (5,)))
ALL = jnp.asarray(RNG.permutation(V))
TARGETS = jnp.asarray(RNG.integers(0, V, (3, 4))).at[0, 1].set(-1)
PARAMS = {
    name: jnp.asarray(RNG.standard_normal(shape), jnp.float32)
    for name, shape in (("table", (V, D)), ("dense", (D, D)), ("head", (D, V)))
}


def cross_entropy(h, table):
    nll = optax.softmax_cross_entropy_with_integer_labels(h @ table, jnp.maximum(TARGETS, 0))
    return jnp.sum(nll * (TARGETS >= 0)) / jnp.sum(TARGETS >= 0)


def body(params, rows):
    return jnp.tanh(rows @ params["dense"])


def plain(params):
    return cross_entropy(body(params, params["table"][IDS]), params["table"].T)


def clipped(params):
    return cross_entropy(body(params, params["table"].at[IDS * 5].get(mode="clip")), params["table"].T)


def filled(params):
    rows = jnp.take(params["table"], IDS * 5, axis=0, mode="fill", fill_value=0)
    return cross_entropy(body(params, rows), params["table"].T)


def backwards(params):
    return cross_entropy(body(params, params["table"][IDS - 6]), params["table"].T)


def called(params):
    rows = jax.jit(lambda table: table[IDS])(params["table"])
    return cross_entropy(body(params, rows), params["table"].T) + 0.1 * jnp.sum(params["table"] ** 2)


def twice(params):
    memory = jnp.mean(params["table"][OTHERS], axis=0)
    return cross_entropy(body(params, params["table"][IDS] + memory), params["table"].T)


def untied(params):
    return cross_entropy(body(params, params["table"][IDS]), params["head"])


SMALL_IDS = IDS.astype(jnp.uint8)


def short_ids(params):
    return cross_entropy(body(params, params["table"][SMALL_IDS]), params["table"].T)


@pytest.mark.parametrize(
    ("loss_fn", "has_targets"),
    [(f, False) for f in (plain, clipped, filled, backwards, called, twice, short_ids)]
    + [(f, True) for f in (filled, twice, untied)],
)
def test_rows_are_those_of_the_dense_tables(loss_fn, has_targets, monkeypatch):
    caught = []
    monkeypatch.setattr(tokenrows, "_caught", lambda *a, f=tokenrows._caught: caught.append(a[0].shape) or f(*a))
    given = {"table": "table"} | ({"head": "head"} if loss_fn is untied else {})
    given |= {"ids": IDS, "targets": TARGETS} if has_targets else {}
    loss, gradients, rows = jax.jit(lambda params: embed_loss_and_gradients(loss_fn, params, **given))(PARAMS)
    assert len(caught) == (2 if loss_fn is twice else 1)
    assert_equal_split(loss, gradients, rows.marked(), loss_fn, given)


def assert_equal_split(loss, gradients, rows, loss_fn, given):
    expected_loss, expected = jax.value_and_grad(loss_fn)(PARAMS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, atol=1e-6 * float(jnp.abs(gradient).max()) + 1e-30)
    dense = split_embed_gradients(loss_fn, PARAMS, **given).stats()
    assert type(dense) is type(rows)
    for name, value in dense._asdict().items():
        np.testing.assert_allclose(getattr(rows, name), value, rtol=2e-5, atol=1e-7, err_msg=name)


def cast(params):
    return cross_entropy(body(params, params["table"].astype(jnp.bfloat16)[IDS]), params["table"].T)


def one_hot_beside(params):
    rows = params["table"][IDS] + jax.nn.one_hot(IDS, V) @ params["table"]
    return cross_entropy(body(params, rows), params["table"].T)


def again(params):
    return cross_entropy(body(params, jax.checkpoint(lambda table: table[IDS])(params["table"])), params["table"].T)


def many(params):
    memory = jnp.mean(params["table"][ALL], axis=0)
    return cross_entropy(body(params, params["table"][IDS] + memory), params["table"].T)


@pytest.mark.parametrize("loss_fn", [cast, one_hot_beside, again, many])
def test_what_is_not_whole_rows_of_the_table_alone_stays_dense(loss_fn, monkeypatch):
    monkeypatch.setattr(tokenrows, "_caught", None)
    loss, gradients, rows = jax.jit(lambda params: embed_loss_and_gradients(loss_fn, params, table="table"))(PARAMS)
    assert_equal_split(loss, gradients, rows.marked(), loss_fn, {"table": "table"})


def test_aux_and_running_op_by_op():
    def loss_fn(params):
        return plain(params), {"mean": params["table"].mean()}

    (loss, aux), gradients, rows = embed_loss_and_gradients(loss_fn, PARAMS, table="table", has_aux=True)
    np.testing.assert_allclose(aux["mean"], PARAMS["table"].mean(), rtol=1e-6)
    assert float(loss) == float(plain(PARAMS))
    assert_equal_split(loss, gradients, rows, plain, {"table": "table"})
