"""The uses of a table in programs of every make, against the definition: one argument of the loss for each use."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.linen import IDS, TARGETS, D, V, assert_close, cross_entropy, jit
from tied_lm import split_embed_gradients

RNG = np.random.default_rng(0)
TABLE, DENSE = RNG.standard_normal((V, D)), RNG.standard_normal((D, D)) / D


def in_blocks(h, table):
    """Logits of a few rows at a time."""
    padded = jnp.pad(table, ((0, 1), (0, 0))).reshape(4, 3, D)
    _, blocks = lax.scan(lambda _, block: (None, h @ block.T), None, padded)
    return jnp.moveaxis(blocks, 0, -2).reshape(*h.shape[:-1], 12)[..., :V]


SCORINGS = {
    "transposed": lambda h, table: h @ table.T,
    "einsum": lambda h, table: jnp.einsum("vd,bld->blv", table, h),
    "remat in scan": lambda h, table: lax.map(jax.checkpoint(lambda x: x @ table.T), h),
    "blocks": in_blocks,
    "normalised": lambda h, table: h @ (table / jnp.linalg.norm(table, axis=-1, keepdims=True)).T,
    "centred": lambda h, table: h @ (table - table.mean(0)).T,
    "capped": lambda h, table: 3 * jnp.tanh(jnp.dot(h, table.T, preferred_element_type=h.dtype) / 3),
}
LOOKUPS = {
    "index": lambda table: table[IDS],
    "take": lambda table: jnp.take(table * D**0.5, IDS, axis=0),
    "one-hot": lambda table: jax.nn.one_hot(IDS, V, dtype=table.dtype) @ table,
    "compared": lambda table: (IDS[..., None] == jnp.arange(V)).astype(table.dtype) @ table,
    "one by one": lambda table: lax.map(lambda ids: lax.map(lambda i: table[i], ids), jnp.asarray(IDS)),
}


@pytest.mark.parametrize(
    ("look_up", "score"), [(name, "transposed") for name in LOOKUPS] + [("index", name) for name in SCORINGS]
)
def test_each_use_against_an_argument_of_its_own(look_up, score):
    def by_use(lookup, scoring, other, dense):
        h = jnp.tanh(LOOKUPS[look_up](lookup) @ dense)
        return cross_entropy(SCORINGS[score](h, scoring)) + 0.1 * jnp.sum(other**2)

    def loss_fn(params):
        return by_use(params["table"], params["table"], params["table"], params["dense"])

    with jax.enable_x64(True):
        params = {"table": jnp.asarray(TABLE), "dense": jnp.asarray(DENSE)}
        found = split_embed_gradients(loss_fn, params, table="table")
        expected = jit(jax.grad(by_use, (0, 1, 2)))(*[params["table"]] * 3, params["dense"])
        assert_close((found.lookup, found.scoring, found.other), expected, atol=1e-10)
        assert_close(found.total, jit(jax.grad(loss_fn))(params)["table"], atol=1e-10)
    assert {use.kind for use in found.uses} == {"lookup", "scoring", "other"}
    assert all(use.source.startswith("test_program.py:") for use in found.uses if use.kind != "other")


def test_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.dense = nnx.Linear(D, D, rngs=rngs)

        def __call__(self, ids):
            return self.embed.attend(jnp.tanh(self.dense(self.embed(ids))))

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    found = split_embed_gradients(
        lambda params: cross_entropy(nnx.merge(graph, params)(IDS)), params, table="embed/embedding"
    )
    table, dense = params["embed"]["embedding"][...], params["dense"]

    def by_use(lookup, scoring):
        return cross_entropy(jnp.tanh(lookup[IDS] @ dense["kernel"][...] + dense["bias"][...]) @ scoring.T)

    assert_close((found.lookup, found.scoring), jit(jax.grad(by_use, (0, 1)))(table, table))
    assert not np.any(found.other)


@jax.custom_vjp
def fused(h, table):
    return cross_entropy(h @ table.T)


fused.defvjp(lambda h, table: jax.vjp(lambda *x: cross_entropy(x[0] @ x[1].T), h, table), lambda back, g: back(g))


def target_gathered(params):
    h = jnp.tanh(params["table"][IDS] @ params["dense"])
    chosen = (h * params["table"][TARGETS]).sum(-1)
    return (jax.nn.logsumexp(h @ params["table"].T, axis=-1) - chosen).mean()


def sampled(params):
    h = jnp.tanh(params["table"][IDS] @ params["dense"])
    return jax.nn.logsumexp(h @ params["table"][jnp.asarray([3, 1, 4])].T, axis=-1).mean()


def soft(params):
    h = jax.nn.softmax(params["table"][IDS] @ params["dense"] @ params["table"].T) @ params["table"]
    return cross_entropy(h @ params["table"].T)


def in_fused(params):
    return fused(jnp.tanh(params["table"][IDS] @ params["dense"]), params["table"])


def log_sum(h, params):
    return jax.nn.logsumexp(h @ params["table"].T, axis=-1).mean()


def hidden(params):
    return jnp.tanh(params["table"][IDS] @ params["dense"])


def target_projected(params):
    h = hidden(params)
    rows = params["table"][TARGETS] @ params["dense"]
    rows = 2 * rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return log_sum(h, params) - (rows * h).sum(-1).mean()


def target_joined(params):
    h = hidden(params)
    pair = jnp.concatenate([h, params["table"][TARGETS]], -1)
    return log_sum(h, params) - (pair @ jnp.tile(params["dense"], (2, 1))).mean()


def target_far_from(params):
    h = hidden(params)
    return log_sum(h, params) + jnp.sum((h - params["table"][TARGETS] @ params["dense"]) ** 2)


def targets_of_one_gather(params):
    rows = params["table"][IDS]
    h = jnp.tanh(rows[:, :-1] @ params["dense"])
    return log_sum(h, params) - (h * (rows[:, 1:] @ params["dense"])).sum(-1).mean()


def by_hand(params):
    h = hidden(params)
    return cross_entropy((h[..., None, :] * params["table"]).sum(-1))


def in_a_while(params):
    def shrink(table):
        return lax.while_loop(lambda t: jnp.sum(t) > 1, lambda t: t / 2, table)

    return cross_entropy(hidden(params) @ shrink(params["table"]).T)


OTHER_IDS = "gather of .* its rows reach the loss and are not of what is scored"
PAIRED = "gather of .* its rows are multiplied by another activation, as to score them"


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (target_gathered, OTHER_IDS),
        (target_projected, OTHER_IDS),
        (target_joined, OTHER_IDS),
        (target_far_from, OTHER_IDS),
        (targets_of_one_gather, PAIRED),
        (sampled, PAIRED),
        (by_hand, "mul of .* the table meets an activation"),
        (in_a_while, "while of .* no reverse derivative"),
        (soft, "dot_general of .* a product over the rows, of what is not provably one-hot"),
        (in_fused, "fused of .* a custom rule is not looked into"),
    ],
)
def test_what_cannot_be_told_is_refused(loss_fn, why):
    params = {"table": jnp.asarray(TABLE, jnp.float32), "dense": jnp.asarray(DENSE, jnp.float32)}
    with pytest.raises(ValueError, match=why):
        split_embed_gradients(loss_fn, params, table="table")


def attention(x, dense):
    """Of one head, whose weights are products of two activations; and a gate, which multiplies two."""
    query, key, value, gate = (x @ (dense * scale) for scale in (1.0, 0.5, -0.7, 0.3))
    mixed = jax.nn.softmax(query @ key.swapaxes(-1, -2)) @ value @ dense
    h = x + (jax.nn.silu(gate) * mixed) @ dense
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


def test_what_is_no_score_is_not_refused():
    """Penalties of rows and hidden states, a second head, and uses that reach no loss but what is returned beside."""

    def by_use(lookup, scoring, dense):
        h = attention(lookup[IDS], dense)
        chance = jax.nn.softmax(h @ dense[:, :2])
        entropy = -(chance * jnp.log(chance)).sum(-1).mean()
        penalty = 0.1 * (lookup[IDS] ** 2).sum() + (h**2).mean() + ((h[:, 1:] - h[:, :-1]) ** 2).mean()
        return cross_entropy(h @ scoring.T) + penalty + entropy

    def loss_fn(params):
        table = params["table"]
        beside = {"soft": jax.nn.softmax(table[IDS] @ table.T) @ table, "target": table[TARGETS] * 2.0, "table": table}
        return by_use(table, table, params["dense"]), beside

    params = {"table": jnp.asarray(TABLE, jnp.float32), "dense": jnp.asarray(DENSE, jnp.float32)}
    found = split_embed_gradients(loss_fn, params, table=lambda params: params["table"], has_aux=True)
    expected = jit(jax.grad(by_use, (0, 1)))(*[params["table"]] * 2, params["dense"])
    assert_close((found.lookup, found.scoring), expected, atol=1e-5)
    assert not np.any(found.other)
    assert {use.kind for use in found.uses} == {"lookup", "scoring"}
    assert_close(found.aux, jit(loss_fn)(params)[1], atol=1e-5)


def test_rows_that_are_named_as_scored():
    params = {"table": jnp.asarray(TABLE, jnp.float32), "dense": jnp.asarray(DENSE, jnp.float32)}
    line = target_gathered.__code__.co_firstlineno + 2
    found = split_embed_gradients(target_gathered, params, table="table", uses={f"test_program.py:{line}": "scoring"})

    def by_use(lookup, scoring):
        return cross_entropy(jnp.tanh(lookup[IDS] @ params["dense"]) @ scoring.T)

    assert_close((found.lookup, found.scoring), jit(jax.grad(by_use, (0, 1)))(*[params["table"]] * 2), atol=1e-5)


def test_a_use_that_is_named():
    params = {"table": jnp.asarray(TABLE, jnp.float32), "dense": jnp.asarray(DENSE, jnp.float32)}
    found = split_embed_gradients(in_fused, params, table="table", uses={"fused": "scoring"})

    def by_use(lookup, scoring):
        return cross_entropy(jnp.tanh(lookup[IDS] @ params["dense"]) @ scoring.T)

    assert_close((found.lookup, found.scoring), jit(jax.grad(by_use, (0, 1)))(*[params["table"]] * 2))
    with pytest.raises(ValueError, match=r"uses=\['fusd'\] names no use of the table; found: lookup: gather"):
        split_embed_gradients(in_fused, params, table="table", uses={"fusd": "scoring", "fused": "scoring"})
    with pytest.raises(ValueError, match=r"uses= has \['score'\]; a use is one of lookup, scoring, other"):
        split_embed_gradients(in_fused, params, table="table", uses={"fused": "score"})


def test_a_table_that_is_neither_looked_up_nor_scored():
    params = {"table": jnp.asarray(TABLE, jnp.float32)}
    with pytest.raises(ValueError, match=r"nothing looks up or scores with 'table'.*found: other: the loss.*NNX"):
        split_embed_gradients(lambda params: jnp.sum(params["table"] ** 2), params, table="table")


def test_a_table_with_one_use_gives_one_warning():
    params = {"table": jnp.asarray(TABLE, jnp.float32), "head": jnp.asarray(TABLE.T, jnp.float32)}

    def looks_up(params):
        return cross_entropy(params["table"][IDS] @ params["head"])

    def scores(params):
        return cross_entropy(np.cos(np.arange(IDS.size * D, dtype=np.float32)).reshape(2, 5, D) @ params["table"].T)

    with pytest.warns(UserWarning, match=r"nothing scores with 'table'.*found: lookup: gather of \(11, 6\) at test_pr"):
        split_embed_gradients(looks_up, params, table="table")
    split_embed_gradients(looks_up, params, table="table")  # said once
    with pytest.warns(UserWarning, match=r"nothing looks 'table' up .*found: scoring: dot_general of"):
        split_embed_gradients(scores, params, table="table")


def test_a_head_beside_a_table_that_scores():
    params = {"table": jnp.ones((V, D)), "head": jnp.ones((D, V))}

    def loss_fn(params):
        return cross_entropy(params["table"][IDS] @ params["head"] + params["table"][IDS] @ params["table"].T)

    with pytest.raises(ValueError, match="head='head', but the table 'table' scores itself: scoring: dot_general"):
        split_embed_gradients(loss_fn, params, table="table", head="head")


def test_a_function_that_picks_no_table():
    params = {"table": jnp.ones((V, D)), "bias": jnp.ones(V)}
    for pick, count in ((lambda p: p["bias"], 1), (lambda p: p, 2)):
        with pytest.raises(ValueError, match=rf"table= picks {count} leaves, not one array \(V, D\) of floats"):
            split_embed_gradients(lambda p: 0.0, params, table=pick)


@pytest.mark.parametrize(
    ("head", "why"),
    [("table", "head='table' is the table itself"), ("spare/embedding", "scores nowhere.*found: lookup")],
)
def test_a_head_that_is_none(head, why):
    params = {"table": jnp.ones((V, D)), "spare": {"embedding": jnp.ones((V, D))}, "head": jnp.ones((D, V))}

    def loss_fn(params):
        return cross_entropy((params["table"] + 0.0)[IDS] @ params["head"]) + jnp.sum(
            (params["spare"]["embedding"][IDS] @ params["head"]) ** 2
        )

    with pytest.raises(ValueError, match=why):
        split_embed_gradients(loss_fn, params, table="table", head=head)
    split_embed_gradients(loss_fn, params, table="table", head="head")
