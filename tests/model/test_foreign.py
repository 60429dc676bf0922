"""The split of models that are not this project's, against the definition: one argument of the loss for each use."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen import IDS, TABLE, TARGETS, D, Tied, V, assert_adds_up, assert_close, cross_entropy, init, jit, split
from tied_lm import TiedEmbedding, embed_loss_and_gradients, split_gradients
from tied_lm.model.bodies import Mlp


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before or after each."""

    norm: str

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(2)
        mask = nn.make_causal_mask(x[..., 0])
        for layer in (lambda y: attention(y, mask=mask), lambda y: nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(y)))):
            norm = nn.LayerNorm()
            x = x + layer(norm(x)) if self.norm == "pre" else norm(x + layer(x))
        return x


class Transformer(nn.Module):
    """As they are written elsewhere: a scaled embedding, and `attend`, whose logits may be scaled."""

    norm: str = "pre"
    logit_scale: float = 1.0

    def setup(self):
        self.token_embed = nn.Embed(V, D)
        self.block = Block(self.norm)
        self.last = nn.LayerNorm()

    def __call__(self, ids):
        h = self.block(self.token_embed(ids) * D**0.5)
        return self.token_embed.attend(self.last(h) if self.norm == "pre" else h) * self.logit_scale


def transformer_by_use(model, params, lookup, scoring):
    """The same model with an array for each use, and without `nn.Embed`."""
    h = Block(model.norm).apply({"params": params["block"]}, lookup[IDS] * D**0.5)
    if model.norm == "pre":
        h = nn.LayerNorm().apply({"params": params["last"]}, h)
    return cross_entropy(h @ scoring.T * model.logit_scale)


@pytest.mark.parametrize(("norm", "logit_scale"), [("pre", 1.0), ("post", D**-0.5)])
def test_transformers(norm, logit_scale):
    model = Transformer(norm, logit_scale)
    params = init(model)["params"]

    def loss_fn(params):
        return cross_entropy(model.apply({"params": params}, IDS))

    found, table = split(loss_fn, params), params["token_embed"]["embedding"]
    by_use = jit(jax.grad(lambda *tables: transformer_by_use(model, params, *tables), (0, 1)))
    assert_close((found.lookup, found.scoring), by_use(table, table))
    assert not np.any(found.other)
    assert found.loss == pytest.approx(float(loss_fn(params)), abs=1e-6)
    assert_adds_up(found, loss_fn, params)


def test_finite_differences_in_float64():
    with jax.enable_x64(True):
        model = Transformer("pre", D**-0.5)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), init(model)["params"])
        table = params["token_embed"]["embedding"]

        def decay(table):
            return 0.1 * jnp.sum(table**2)

        def loss_fn(params):
            return cross_entropy(model.apply({"params": params}, IDS)) + decay(params["token_embed"]["embedding"])

        @jit
        def by_use(lookup, scoring, other):
            return transformer_by_use(model, params, lookup, scoring) + decay(other)

        found = split(loss_fn, params)
        assert found.total.dtype == jnp.float64
        rng, step = np.random.default_rng(0), 1e-5
        for k, part in enumerate(("lookup", "scoring", "other")):
            direction = rng.standard_normal(table.shape)
            moved = [[table + sign * step * direction * (k == use) for use in range(3)] for sign in (1, -1)]
            slope = (by_use(*moved[0]) - by_use(*moved[1])) / (2 * step)
            assert np.sum(getattr(found, part) * direction) == pytest.approx(float(slope), rel=1e-7, abs=1e-9), part


@pytest.mark.parametrize("body", [None, Mlp()], ids=["none", "mlp"])
def test_the_same_as_this_projects_own_model(body):
    model, own = Tied(body), TiedEmbedding(V, D, body)
    params = init(model)["params"]
    found = split(lambda params: cross_entropy(model.apply({"params": params}, IDS)), params)
    theirs = {"embedding": params["token_embed"]["embedding"]} | {k: v for k, v in params.items() if k == "body"}
    expected = jit(split_gradients, static_argnums=0)(own, theirs, IDS, TARGETS)
    for part in ("loss", "lookup", "scoring", "total"):
        assert_close(getattr(found, part), getattr(expected, part))


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(V, D, name="token_embed")
        memory = nn.Dense(D, name="encoder")(embed(source)).mean(axis=-2, keepdims=True)
        return embed.attend(jnp.tanh(nn.Dense(D, name="decoder")(embed(target)) + memory))


def test_an_encoder_decoder_that_looks_one_table_up_twice():
    model, source = EncoderDecoder(), IDS[:, ::-1] % 4
    params = init(model, source, IDS)["params"]

    def by_use(encoder_table, decoder_table, scoring):
        memory = (encoder_table[source] @ params["encoder"]["kernel"] + params["encoder"]["bias"]).mean(
            -2, keepdims=True
        )
        h = jnp.tanh(decoder_table[IDS] @ params["decoder"]["kernel"] + params["decoder"]["bias"] + memory)
        return cross_entropy(h @ scoring.T)

    def loss_fn(params):
        return cross_entropy(model.apply({"params": params}, source, IDS))

    found, table = split(loss_fn, params), params["token_embed"]["embedding"]
    encoder, decoder, scoring = jit(jax.grad(by_use, (0, 1, 2)))(table, table, table)
    assert np.abs(encoder).max() > 1e-2
    assert_close((found.lookup, found.scoring), (encoder + decoder, scoring))
    assert_adds_up(found, loss_fn, params)


class Cell(nn.Module):
    @nn.compact
    def __call__(self, h, ids):
        embed = nn.Embed(V, D, name="token_embed")
        h = jnp.tanh(nn.Dense(D, name="dense")(h) + embed(ids))
        return h, embed.attend(h)


WRAPPED = {"scan": Cell, "remat in scan": nn.remat(Cell), "jit in scan": nn.jit(Cell)}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_an_embed_inside_a_scan(wrapped):
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, ids):
            scan = nn.scan(WRAPPED[wrapped], variable_broadcast="params", split_rngs={"params": False})
            return scan(name="cell")(jnp.zeros((2, D)), ids.T)[1].swapaxes(0, 1)

    model = Recurrent()
    params = init(model)["params"]
    (cell,) = params.values()

    def by_use(lookup, scoring):
        h, logits = jnp.zeros((2, D)), []
        for ids in IDS.T:
            h = jnp.tanh(h @ cell["dense"]["kernel"] + cell["dense"]["bias"] + lookup[ids])
            logits.append(h @ scoring.T)
        return cross_entropy(jnp.stack(logits, 1))

    def loss_fn(params):
        return cross_entropy(model.apply({"params": params}, IDS))

    name = f"{next(iter(params))}/{TABLE}"
    found, table = split(loss_fn, params, table=name), cell["token_embed"]["embedding"]
    assert_close((found.lookup, found.scoring), jit(jax.grad(by_use, (0, 1)))(table, table))
    assert_adds_up(found, loss_fn, params, name)


def test_layers_of_a_scan_with_a_table_each():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, ids):
            embed = nn.Embed(V, D, name="token_embed")
            return jnp.tanh(h + embed(ids)), embed.attend(h)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, ids):
            scan = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=3
            )
            _, logits = scan(name="layers")(jnp.ones((*ids.shape, D)), ids)
            return logits.sum(0)

    model = Stack()
    params = init(model)["params"]

    def by_use(lookup, scoring):
        h, logits = jnp.ones((*IDS.shape, D)), 0
        for k in range(3):
            logits += h @ scoring[k].T
            h = jnp.tanh(h + lookup[k][IDS])
        return cross_entropy(logits)

    table = params["layers"]["token_embed"]["embedding"]
    found = split(lambda p: cross_entropy(model.apply({"params": p}, IDS)), params, table="layers/" + TABLE)
    assert found.lookup.shape == (3, V, D)
    assert found.stats().cosine.shape == (3, V)
    assert_close((found.lookup, found.scoring), jit(jax.grad(by_use, (0, 1)))(table, table))


class Wrapped(nn.Module):
    embed: type[nn.Embed]
    options: tuple = ()

    @nn.compact
    def __call__(self, ids, train=False):
        embed = self.embed(V, D, name="token_embed", **dict(self.options))
        x = nn.BatchNorm(use_running_average=not train)(embed(ids))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return embed.attend(nn.Dense(D)(x))


def normalised(variables):
    return jax.tree.map(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), variables)


class Calling(nn.Embed):
    """Looks up through the methods of its base."""

    def __call__(self, ids):
        return 2 * super().__call__(ids)


def rows(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


EMBEDS = {
    "remat": (nn.remat(nn.Embed, methods=["__call__", "attend"]), ()),
    "jit": (nn.jit(nn.Embed, methods=["__call__", "attend"]), ()),
    "subclass": (Calling, ()),
    "boxed": (nn.Embed, (("embedding_init", nn.with_partitioning(rows, ("vocab", None))),)),
    "logical": (nn.Embed, (("embedding_init", nn.with_logical_partitioning(rows, ("vocab", None))),)),
    "bfloat16": (nn.Embed, (("dtype", jnp.bfloat16),)),
    "transformed": (
        nn.map_variables(nn.Embed, "params", normalised, init=True, methods=["__call__", "attend"]),
        (),
    ),
}


@pytest.mark.parametrize("name", EMBEDS)
def test_whatever_lies_between_a_use_and_the_parameter(name):
    model = Wrapped(*EMBEDS[name])
    variables = init(model)

    def loss_fn(params):
        return cross_entropy(model.apply(variables | {"params": params}, IDS).astype(jnp.float32))

    found = split(loss_fn, variables["params"])
    assert found.lookup.dtype == np.float32
    assert_adds_up(found, loss_fn, variables["params"], atol=1e-4 if name == "bfloat16" else 1e-6)
    assert not np.any(found.other)
    # Only a row that was looked up can have a lookup, and only a use that is cut off loses its part.
    assert np.flatnonzero(np.abs(found.lookup).max(-1)).tolist() == np.unique(IDS).tolist()


def test_collections_auxiliary_values_and_dropout():
    model = Wrapped(nn.Embed)
    variables = init(model)

    def loss_fn(params):
        out, new = model.apply(
            variables | {"params": params}, IDS, train=True, mutable="batch_stats", rngs={"dropout": jax.random.key(3)}
        )
        return cross_entropy(out), {"new": new, "shape": out.shape[0]}

    found = split(loss_fn, variables["params"], has_aux=True)
    (loss, aux), gradients = jit(jax.value_and_grad(loss_fn, has_aux=True))(variables["params"])
    assert_close((found.loss, found.aux), (loss, aux))
    assert_adds_up(found, lambda params: loss_fn(params)[0], variables["params"])
    step = jit(lambda params: embed_loss_and_gradients(loss_fn, params, table=TABLE, has_aux=True))
    value, theirs, stats = step(variables["params"])
    assert_close((value, theirs), ((loss, aux), gradients))
    assert_close(stats.marked(), found.stats())
