"""The split: what the lookup and what the scoring ask of each vocabulary row.

Loss = mean over the N tokens that are not masked of -log softmax(logits_t)[y_t]. With p_t the softmax, per row v:

    lookup[v]  = sum over t with x_t = v of dL/dx_t
    expected[v] = (1/N) sum_t p_t[v] h_t          own[v] = (1/N) sum over t with y_t = v of p_t[v] h_t
    data[v]    = (1/N) sum over t with y_t = v of h_t
    pull = own - data      push = expected - own      scoring = pull + push = expected - data

`push` and `pull` come from these sums, not from `scoring` less the other: that would cancel in float32.
Sums go into the table first and norms are taken after, since norms do not add.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from tied_lm.embedding import VocabularyModel
from tied_lm.loss import vocabulary_loss

PARTS = ("lookup", "scoring", "pull", "push", "total")


class Backward(NamedTuple):
    """One backward pass, with what the split needs of it."""

    loss: Float[Array, ""]
    gradients: PyTree
    inputs: Int[Array, "N"]
    targets: Int[Array, "N"]
    weights: Float[Array, "N"]  # of the mean over tokens, 0 where masked
    nll: Float[Array, "N"]
    h: Float[Array, "N D"]
    dx: Float[Array, "N D"]  # dL/d(looked-up vector)
    expected: Float[Array, "V D"]
    data: Float[Array, "V D"]


class Tables(NamedTuple):
    """The sums of the split. They are linear in the tokens: weighted tables of several batches add up."""

    lookup: Float[Array, "V D"]
    expected: Float[Array, "V D"]
    own: Float[Array, "V D"]
    data: Float[Array, "V D"]


class GradientSplit(NamedTuple):
    """Gradients of the mean loss (nats), as (V, D) tables. In an untied model `total` is hypothetical: there
    lookup is the gradient of one matrix and scoring that of another."""

    loss: Float[Array, ""]
    lookup: Float[Array, "V D"]
    scoring: Float[Array, "V D"]
    pull: Float[Array, "V D"]
    push: Float[Array, "V D"]
    total: Float[Array, "V D"]


class RowStats(NamedTuple):
    """L2 norms of the rows of the split's tables; the cosine of lookup and scoring, 0 where either is 0; and how
    often each row was looked up, and was an unmasked target. `total` and `cosine` are hypothetical if untied."""

    lookup: Float[Array, "V"]
    scoring: Float[Array, "V"]
    pull: Float[Array, "V"]
    push: Float[Array, "V"]
    total: Float[Array, "V"]
    cosine: Float[Array, "V"]
    input_count: Int[Array, "V"]
    target_count: Int[Array, "V"]


def backward(
    model: VocabularyModel,
    params: PyTree,
    inputs: Int[Array, "*N"],
    targets: Int[Array, "*N"],
    *,
    mask: Bool[Array, "*N"] | None = None,
    rngs: dict[str, Array] | None = None,
    train: bool = False,
) -> Backward:
    """Loss and gradients, and beside them the intermediate values that the split is made of."""

    def hidden(params: PyTree, offset: Array) -> tuple[Array, Array]:
        variables = {"params": params}
        return cast(
            tuple[Array, Array],
            model.apply(variables, inputs, offset=offset, train=train, rngs=rngs, method="hidden"),
        )

    (h, scoring_VxD), pullback = jax.vjp(hidden, params, jnp.zeros((*inputs.shape, model.features)))
    h_NxD, targets_N = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    kept_N = jnp.ones(targets_N.shape) if mask is None else mask.reshape(-1).astype(jnp.float32)
    weights_N = kept_N / jnp.maximum(kept_N.sum(), 1)
    loss = vocabulary_loss(h_NxD, scoring_VxD, targets_N, weights_N)
    data_VxD = jnp.zeros_like(scoring_VxD).at[targets_N].add(h_NxD * weights_N[:, None])
    gradients, dx = pullback((loss.hidden.reshape(h.shape), loss.expected - data_VxD))
    return Backward(
        jnp.sum(loss.nll * weights_N),
        gradients,
        inputs.reshape(-1),
        targets_N,
        weights_N,
        loss.nll,
        h_NxD,
        dx.reshape(-1, model.features),
        loss.expected,
        data_VxD,
    )


def tables(b: Backward) -> Tables:
    """The sums of the split, at a cost of O(N D + V D)."""
    zeros_VxD = jnp.zeros_like(b.expected)
    own_NxD = b.h * (b.weights * jnp.exp(-b.nll))[:, None]
    return Tables(zeros_VxD.at[b.inputs].add(b.dx), b.expected, zeros_VxD.at[b.targets].add(own_NxD), b.data)


def counts(b: Backward) -> tuple[Int[Array, "V"], Int[Array, "V"]]:
    """How often each row was looked up, and was an unmasked target."""
    zeros_V = jnp.zeros(b.expected.shape[0], jnp.int32)
    return zeros_V.at[b.inputs].add(1), zeros_V.at[b.targets].add((b.weights > 0).astype(jnp.int32))


def stats_of_tables(t: Tables, input_count: Int[Array, "V"], target_count: Int[Array, "V"]) -> RowStats:
    """Norms and cosines of the rows of the tables."""

    def norm(table_VxD: Array) -> Array:
        return jnp.sqrt(jnp.sum(table_VxD * table_VxD, axis=-1))

    scoring_VxD = t.expected - t.data
    lookup, scoring = norm(t.lookup), norm(scoring_VxD)
    # Dividing twice, since the product of two tiny norms is 0 in float32.
    dot = jnp.sum(t.lookup / jnp.where(lookup > 0, lookup, 1)[:, None] * scoring_VxD, axis=-1)
    cosine = jnp.where((lookup > 0) & (scoring > 0), jnp.clip(dot / jnp.where(scoring > 0, scoring, 1), -1, 1), 0)
    pull, push, total = norm(t.own - t.data), norm(t.expected - t.own), norm(t.lookup + scoring_VxD)
    return RowStats(lookup, scoring, pull, push, total, cosine, input_count, target_count)


def sum_rule_residual(model: VocabularyModel, b: Backward) -> Float[Array, ""]:
    """|sum_v (g - lookup)[v]| / |g|, with g the gradient of the matrix that scores; in an untied model nothing is
    subtracted. It is 0 up to rounding, since every softmax sums to 1: sum_v scoring[v] = 0."""
    gradient_VxD = b.gradients[model.vocabulary[-1]]
    rest_D = gradient_VxD.sum(axis=0)
    if len(model.vocabulary) == 1:
        rest_D = rest_D - b.dx.sum(axis=0)
    norm = jnp.linalg.norm(gradient_VxD)
    return jnp.linalg.norm(rest_D) / jnp.where(norm > 0, norm, 1)


def loss_and_gradients(
    model: VocabularyModel,
    params: PyTree,
    inputs: Int[Array, "*N"],
    targets: Int[Array, "*N"],
    *,
    mask: Bool[Array, "*N"] | None = None,
    rngs: dict[str, Array] | None = None,
    train: bool = False,
    rows: bool = False,
) -> tuple[Float[Array, ""], PyTree, RowStats | None]:
    """Mean loss in nats, its gradients in `params` (the inner tree), and with `rows` the statistics of the rows.

    Args:
        mask: False where a target does not count. Every input is looked up all the same.
    """
    b = backward(model, params, inputs, targets, mask=mask, rngs=rngs, train=train)
    return b.loss, b.gradients, stats_of_tables(tables(b), *counts(b)) if rows else None


def row_stats(model: VocabularyModel, params: PyTree, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]) -> RowStats:
    """Norms, cosines and counts of the rows for one batch.

    >>> import jax.numpy as jnp
    >>> from tied_lm import TiedEmbedding
    >>> params = {"embedding": jnp.array([[1., 0.], [2., 0.], [0., 1.]])}
    >>> stats = row_stats(TiedEmbedding(3, 2), params, jnp.array([0, 2, 0]), jnp.array([2, 0, 1]))
    >>> stats.input_count.tolist(), stats.target_count.tolist()
    ([2, 0, 1], [1, 1, 1])
    >>> bool(stats.lookup[1] == 0), bool(stats.scoring[1] > 0)  # never looked up, yet scored
    (True, True)
    """
    b = backward(model, params, inputs, targets)
    return stats_of_tables(tables(b), *counts(b))


def split_gradients(
    model: VocabularyModel, params: PyTree, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]
) -> GradientSplit:
    """The split as dense float32 tables, for study: two of size (V, D) for each part."""
    b = backward(model, params, inputs, targets)
    t = tables(b)
    scoring_VxD = t.expected - t.data
    return GradientSplit(b.loss, t.lookup, scoring_VxD, t.own - t.data, t.expected - t.own, t.lookup + scoring_VxD)
