"""The split by use, whatever the loss function does; and what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.linen import IDS, SMALL, TABLE, TARGETS, D, V, assert_adds_up, assert_close, cross_entropy, init, jit, split
from tied_lm import embed_loss_and_gradients, split_embed_gradients
from tied_lm.model import byuse
from tied_lm.model.foreign import split_table_gradients
from tied_lm.rows import row_cosine


def test_what_is_no_use_is_other():
    model = SMALL
    params = init(model)["params"]
    table = params["token_embed"]["embedding"]

    def plain(params):
        return cross_entropy(model.apply({"params": params}, IDS))

    def loss_fn(params):
        direct = jnp.sum(jnp.sin(params["token_embed"]["embedding"][3]))
        return plain(params) + 5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params)) + direct

    found, without = split(loss_fn, params), split(plain, params)
    assert_close((found.lookup, found.scoring), (without.lookup, without.scoring), atol=1e-7)
    assert_close(found.other, (10 * table).at[3].add(jnp.cos(table[3])), atol=1e-5)
    assert_adds_up(found, loss_fn, params, atol=1e-5)
    assert_close(found.stats().other, np.linalg.norm(found.other, axis=-1), atol=1e-5)


class Untied(nn.Module):
    head: str

    @nn.compact
    def __call__(self, ids):
        h = nn.Dense(D)(nn.Embed(V, D, name="token_embed")(ids))
        return nn.Dense(V, name="logits")(h) if self.head == "dense" else nn.Embed(V, D, name="out").attend(h)


@pytest.mark.parametrize(("kind", "head"), [("dense", "logits/kernel"), ("embed", "out/embedding")])
def test_an_untied_head(kind, head):
    model = Untied(kind)
    params = init(model)["params"]

    def loss_fn(params):
        return cross_entropy(model.apply({"params": params}, IDS))

    found, gradients = split(loss_fn, params, head=head), jit(jax.grad(loss_fn))(params)
    expected = gradients["logits"]["kernel"].T if kind == "dense" else gradients["out"]["embedding"]
    assert_close((found.lookup, found.scoring), (gradients["token_embed"]["embedding"], expected))
    assert_close(found.total, found.lookup + found.scoring)
    step = jit(lambda params: embed_loss_and_gradients(loss_fn, params, table=TABLE, head=head))
    _, theirs, stats = step(params)
    assert_close(theirs, gradients)
    assert_close(stats.marked(), found.stats())
    with pytest.raises(ValueError, match=r"'Dense_0/kernel' gives rows of shape \(6, 6\), but the table is \(11, 6\)"):
        split(loss_fn, params, head="Dense_0/kernel")


def test_a_program_traced_before_is_traced_again():
    model = SMALL
    params = init(model)["params"]
    loss_fn = jax.jit(lambda params: cross_entropy(model.apply({"params": params}, IDS)))
    before = jit(jax.grad(loss_fn))(params)
    for _ in range(2):
        found = split(loss_fn, params)
        assert_adds_up(found, loss_fn, params)
        assert not np.any(found.other)
    jax.tree.map(np.testing.assert_array_equal, jit(jax.grad(loss_fn))(params), before)


def small_loss(params, ids=IDS, targets=TARGETS):
    logits = SMALL.apply({"params": params}, ids)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def over_microbatches(params):
    def add(total, batch):
        return total + small_loss(params, *batch) / 2, None

    return jax.lax.scan(add, 0.0, (IDS, TARGETS))[0]


def on_generated(params):
    frozen = jax.lax.stop_gradient(params)

    def generate(_, ids):
        return ids + 0 * jnp.argmax(SMALL.apply({"params": frozen}, ids), -1).astype(ids.dtype)

    return small_loss(params, jax.lax.fori_loop(0, 2, generate, jnp.asarray(IDS)))


@jax.custom_vjp
def fused(params):
    return jax.tree.map(lambda x: x + 0.0, params)


fused.defvjp(lambda params: (params, None), lambda _, gradients: (gradients,))


LOSSES = {
    "checkpoint": jax.jit(jax.checkpoint(small_loss)),
    "microbatches": over_microbatches,
    "generated": jax.jit(on_generated),
    "custom gradient": jax.jit(lambda params: small_loss(fused(params))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_every_make(name):
    params = init(SMALL)["params"]
    found, expected = split(LOSSES[name], params), split(small_loss, params)
    for part in ("loss", "lookup", "scoring", "other", "total"):
        assert_close(getattr(found, part), getattr(expected, part))


def test_an_embed_that_is_the_whole_model():
    model, params = nn.Embed(V, D), {"lm": {"embedding": jnp.cos(jnp.arange(V * D, dtype=jnp.float32)).reshape(V, D)}}

    def loss_fn(params):
        x = model.apply({"params": params["lm"]}, IDS)
        return cross_entropy(model.apply({"params": params["lm"]}, x, method="attend"))

    assert_adds_up(split(loss_fn, params, table="lm/embedding"), loss_fn, params, "lm/embedding")


def test_a_frozen_model_beside_it_is_not_its_lookup():
    model = SMALL
    params, teacher = init(model)["params"], init(model, key=5)["params"]

    def student(params):
        return cross_entropy(model.apply({"params": params}, IDS))

    @jax.jit
    def loss_fn(params):
        taught = jax.nn.softmax(model.apply({"params": teacher}, IDS))
        return student(params) + 0 * jnp.sum(taught)

    assert_close(split(loss_fn, params)[:5], split(student, params)[:5])


def test_the_params_of_the_model_may_be_a_part_of_those_given():
    model = SMALL
    both = {"model": init(model)["params"], "other": {"scale": jnp.ones(())}}

    def loss_fn(params):
        return params["other"]["scale"] * cross_entropy(model.apply({"params": params["model"]}, IDS))

    assert_adds_up(split(loss_fn, both, table="model/" + TABLE), loss_fn, both, "model/" + TABLE)


def test_in_a_step_it_is_value_and_grad():
    model = SMALL
    params = init(model)["params"]

    def loss_fn(params):
        return cross_entropy(model.apply({"params": params}, IDS))

    def step(params, rows):
        return embed_loss_and_gradients(loss_fn, params, table=TABLE, rows=rows)

    expected = jit(jax.value_and_grad(loss_fn))(params)
    assert step(params, False)[2] is None
    loss, gradients, stats = jit(step, static_argnums=1)(params, True)
    assert_close((loss, gradients), expected)
    found = split_embed_gradients(loss_fn, params, table=TABLE)
    for part in ("lookup", "scoring", "other", "total"):
        assert_close(getattr(stats, part), np.linalg.norm(getattr(found, part), axis=-1))
    assert_close(stats.cosine, row_cosine(found.lookup, found.scoring), atol=1e-5)
    assert not np.asarray(stats.lookup)[[4, 6, 7, 8, 10]].any()
    assert np.all(np.asarray(stats.scoring) > 0)


@pytest.mark.slow
def test_the_step_does_hardly_more_work():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(4096, 64, name="token_embed")
            x = embed(ids)
            x += nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            return embed.attend(nn.LayerNorm()(x))

    model, ids = Model(), jnp.zeros((4, 128), jnp.int32)
    params = model.init(jax.random.key(0), ids)["params"]

    def step(params, rows):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, ids), ids).mean()

        return embed_loss_and_gradients(loss_fn, params, table=TABLE, rows=rows)

    plain, with_rows = (jax.jit(step, static_argnums=1).lower(params, rows).compile() for rows in (False, True))
    assert with_rows.cost_analysis()["flops"] < 1.01 * plain.cost_analysis()["flops"]
    table = 4096 * 64 * 4
    extra = with_rows.memory_analysis().temp_size_in_bytes - plain.memory_analysis().temp_size_in_bytes
    assert extra < 3.5 * table


@pytest.mark.parametrize("path", ["token_embed", "embed/embedding", "block/norm/embedding", "body/up/kernel/embedding"])
def test_a_path_that_does_not_exist(path):
    params = {"position": {"embedding": jnp.zeros((3, 2))}, "token_embed": {"embedding": jnp.zeros((V, D))}}
    with pytest.raises(
        KeyError, match=rf"no table '{path}'.*: position/embedding \(3, 2\), token_embed/embedding \(11, 6\)"
    ):
        split(lambda params: 0.0, params, table=path)


def test_a_loss_that_contains_gradients_is_refused():
    model = SMALL
    params = init(model)["params"]

    def plain(params):
        return cross_entropy(model.apply({"params": params}, IDS))

    def loss_fn(params):
        return plain(params) + optax.tree.norm(jax.grad(plain)(params))

    with pytest.raises(ValueError, match="cannot be told: a product over the rows, of what is not provably one-hot"):
        split(loss_fn, params)


def test_the_two_argument_form():
    rng = np.random.default_rng(0)
    lookup, scoring = (jnp.asarray(rng.standard_normal((V, D)), jnp.float32) for _ in range(2))

    def loss_fn(lookup_table, scoring_table):
        h = jnp.tanh(lookup_table[IDS])
        return cross_entropy(h @ scoring_table.T), h

    tied = split_table_gradients(loss_fn, lookup, has_aux=True)
    assert_close(tied.total, jax.grad(lambda table: loss_fn(table, table)[0])(lookup))
    assert_close(tied.aux, jnp.tanh(lookup[IDS]))
    untied = split_table_gradients(lambda *tables: loss_fn(*tables)[0], lookup, scoring)
    assert_close((untied.lookup, untied.scoring), jax.grad(lambda *t: loss_fn(*t)[0], (0, 1))(lookup, scoring))
    assert not np.any(untied.other)
    assert_close(untied.stats().total, np.linalg.norm(untied.lookup + untied.scoring, axis=-1))


def test_a_use_that_is_missed_is_noticed(monkeypatch):
    """What the tests above would see if a lookup were none."""
    params = init(SMALL)["params"]

    def loss_fn(params):
        return cross_entropy(SMALL.apply({"params": params}, IDS))

    def without_lookup(tables):
        return lambda *args: tables(*args) | {"lookup": 0 * tables(*args)["lookup"]}

    monkeypatch.setattr(byuse, "_tables", without_lookup(byuse._tables))
    with pytest.raises(AssertionError):
        assert_adds_up(split(loss_fn, params), loss_fn, params)
