"""The split: what the lookup and what the scoring ask of each vocabulary row.

Loss = mean over the N tokens that are not masked of -log softmax(logits_t)[y_t]. With p_t the softmax, per row v:

    lookup[v]  = sum over t with x_t = v of dL/dx_t
    expected[v] = (1/N) sum_t p_t[v] h_t          own[v] = (1/N) sum over t with y_t = v of p_t[v] h_t
    data[v]    = (1/N) sum over t with y_t = v of h_t
    pull = own - data      push = expected - own      scoring = pull + push = expected - data

`push` and `pull` come from these sums, not from `scoring` less the other: that would cancel in float32.
Sums go into the table first and norms are taken after, since norms do not add.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from tied_lm.model.arguments import check_ids
from tied_lm.model.embedding import Params, ScoringGradient, Step, VocabularyModel
from tied_lm.model.loss import vocabulary_loss
from tied_lm.model.mesh import ONE_DEVICE, Layout
from tied_lm.model.tokenrows import Holders
from tied_lm.rows import RowStats, mark_undefined, row_norm, statistics


class Backward(NamedTuple):
    """One backward pass, with what the split needs of it."""

    loss: Float[Array, ""]
    gradients: PyTree
    inputs: Int[Array, "N"]
    mask: Bool[Array, "N"]
    lookup: Float[Array, "N R"]  # what each position asks of the row that it looked up
    matrix: Float[Array, "V R"]  # whose rows score
    scoring: ScoringGradient
    others: tuple[Params, Params]  # gradients of the scheme's other parameters, by lookup and by scoring
    carry: PyTree  # what the body hands to the next batch; {} if it is of a kind that does not


class Tables(NamedTuple):
    """The sums of the split. They are linear in the tokens: weighted tables of several batches add up."""

    lookup: Float[Array, "V D"]
    expected: Float[Array, "V D"]
    own: Float[Array, "V D"]
    data: Float[Array, "V D"]
    push_parts: dict[str, Float[Array, "V D"]]


class Split(NamedTuple):
    """Rows (R) of the tables of the split."""

    lookup: Float[Array, "R D"]
    scoring: Float[Array, "R D"]
    pull: Float[Array, "R D"]
    push: Float[Array, "R D"]
    total: Float[Array, "R D"]


class GradientSplit(NamedTuple):
    """Gradients of the mean loss (nats), as (V, D) tables. In an untied model `total` is hypothetical: there
    lookup is the gradient of one matrix and scoring that of another."""

    loss: Float[Array, ""]
    lookup: Float[Array, "V D"]
    scoring: Float[Array, "V D"]
    pull: Float[Array, "V D"]
    push: Float[Array, "V D"]
    total: Float[Array, "V D"]
    push_parts: dict[str, Float[Array, "V D"]]  # of a scheme that tells parts of its push apart; else {}
    others: tuple[Params, Params]  # other parameters of a scheme: gradients by lookup, by scoring


def backward(
    model: VocabularyModel,
    params: PyTree,
    inputs: Int[Array, "*N"],
    targets: Int[Array, "*N"],
    *,
    mask: Bool[Array, "*N"] | None = None,
    rngs: dict[str, Array] | None = None,
    carry: PyTree = None,
    step: Step = 0,
    train: bool = False,
    z_loss: float = 0.0,
) -> Backward:
    """Loss and gradients, and beside them what the split is made of.

    The loss is taken as one of two copies of the scheme's parameters, of which one looks up and the other scores: the
    gradient in each is that of its use, and a parameter receives their sum.

    Args:
        carry: what the body took from the batch before; no gradient flows through it. By default a fresh start.
        step: the number of updates so far, with which a scheme may change what the matrices receive.
        z_loss: weight of the squared log-sum-exp, see `vocabulary_loss`. It is in the gradients and not in the loss.
    """

    apply = functools.partial(model.apply, rngs=rngs, method="hidden", mutable=["carry"])

    def forward(params: PyTree, rows: Array, at_scoring: Params) -> tuple[tuple[Array, Array], PyTree]:
        variables = {"params": params} | ({"carry": carry} if carry else {})
        outputs, changed = apply(variables, inputs, rows=rows, at_scoring=at_scoring, train=train)
        return outputs, changed.get("carry", {})

    own = {name: jnp.asarray(leaf) for name, leaf in params.items() if name != "body"}
    # The rows are an argument beside their matrix, since a gradient in them is N x R, and in the matrix V x R.
    (h, scoring_VxR), pullback, new_carry = jax.vjp(forward, params, own["embedding"][inputs], own, has_aux=True)
    inputs_N, targets_N, h_NxR = inputs.reshape(-1), targets.reshape(-1), h.reshape(-1, model.row_width)
    mask_N = jnp.ones(targets_N.shape, bool) if mask is None else mask.reshape(-1).astype(bool)
    weights_N = mask_N / jnp.maximum(mask_N.sum(), 1)
    dtype, marks_N = model.compute_dtype, model.marks(targets_N)
    loss = vocabulary_loss(
        h_NxR,
        scoring_VxR,
        targets_N,
        weights_N,
        soft_cap=model.logit_cap,
        z_loss=z_loss,
        compute_dtype=dtype,
        marks_N=marks_N,
        block_tokens=model.block_tokens,
        layout=model.layout,
    )
    by_lookup, rows_gradient, by_scoring = pullback((loss.h_gradient.reshape(h.shape), loss.scoring))
    asked = ScoringGradient(
        loss.scoring, loss.expected, h_NxR, targets_N, loss.data_weight, loss.own_weight, loss.expected_parts, {}
    )
    lookup_NxR, scoring = model.receive(rows_gradient.reshape(h_NxR.shape), asked)
    if scoring is not asked:
        by_scoring[model.scorer] = scoring.table
    if model.penalty(own) is not None:
        by_scoring = jax.tree.map(jnp.add, by_scoring, jax.grad(model.penalty)(own))
    gradients = by_lookup | {name: by_lookup[name] + by_scoring[name] for name in own}
    return Backward(
        loss=jnp.sum(loss.nll * weights_N),
        gradients=model.add_lookup(gradients, inputs_N, lookup_NxR, step),
        inputs=inputs_N,
        mask=mask_N,
        lookup=lookup_NxR,
        matrix=scoring_VxR,
        scoring=scoring,
        others=({name: by_lookup[name] for name in model.others}, {name: by_scoring[name] for name in model.others}),
        carry=new_carry,
    )


def tables(b: Backward) -> Tables:
    """The sums of the split, as tables."""
    return Tables(
        lookup=jnp.zeros_like(b.scoring.expected).at[b.inputs].add(b.lookup),
        expected=b.scoring.expected,
        own=b.scoring.at_targets(b.scoring.own_weight),
        data=b.scoring.at_targets(b.scoring.data_weight),
        push_parts=b.scoring.push_parts,
    )


def counts(b: Backward) -> tuple[Int[Array, "V"], Int[Array, "V"]]:
    """How often each row was looked up, and was an unmasked target."""
    zeros_V = jnp.zeros(b.scoring.expected.shape[0], jnp.int32)
    return zeros_V.at[b.inputs].add(1), zeros_V.at[b.scoring.targets].add(b.mask.astype(jnp.int32))


def split_of(t: Tables) -> Split:
    """The tables of the split from its sums."""
    scoring_RxD = t.expected - t.data
    return Split(t.lookup, scoring_RxD, t.own - t.data, t.expected - t.own, t.lookup + scoring_RxD)


def stats_of_tables(t: Tables, input_count: Int[Array, "V"], target_count: Int[Array, "V"]) -> RowStats:
    """Statistics of the rows of the tables."""
    found = statistics(split_of(t), RowStats._fields)
    return RowStats(**found, input_count=input_count, target_count=target_count)


def stats_of(b: Backward, layout: Layout = ONE_DEVICE) -> RowStats:
    """Statistics of the rows, in O(N D + V D) and on one device with no table of size (V, D) when 2 N < V.

    Only rows that are inputs or targets, at most 2 N, have a lookup, own or data. Their sums are made in (2 N, D)
    arrays, at one token for each row; on all other rows scoring and push are the row of `expected`. On several devices
    that would have each of them gather all tokens, and the sums are made in its own rows of three tables.
    """
    asked = b.scoring
    rows, ids_2N = asked.expected.shape[0], jnp.concatenate([b.inputs, asked.targets])
    if layout.mesh is not None or ids_2N.size >= rows:
        return stats_of_tables(tables(b), *counts(b))
    holders = Holders.of(ids_2N, rows)
    input_N, target_N = jnp.split(holders.of_token, 2)
    zeros_2NxD, zeros_VxD = jnp.zeros((ids_2N.size, asked.h.shape[-1])), jnp.zeros_like(asked.expected)
    of_tokens = Tables(
        lookup=zeros_2NxD.at[input_N].add(b.lookup),
        expected=asked.expected[ids_2N],
        own=zeros_2NxD.at[target_N].add(asked.own_weight[:, None] * asked.h),
        data=zeros_2NxD.at[target_N].add(asked.data_weight[:, None] * asked.h),
        push_parts={},
    )
    of_others = Tables(zeros_VxD, asked.expected, zeros_VxD, zeros_VxD, {})
    at_tokens, elsewhere = (statistics(split_of(t), RowStats._fields) for t in (of_tokens, of_others))
    input_count, target_count = counts(b)
    return RowStats(
        **{name: holders.spread(values_2N, elsewhere[name]) for name, values_2N in at_tokens.items()},
        input_count=input_count,
        target_count=target_count,
    )


def sum_rule_residual(model: VocabularyModel, b: Backward, step: Step = 0) -> Float[Array, ""]:
    """|sum_v (g - lookup)[v]| / |g|, with g the gradient of the matrix that scores; where it is untied nothing is
    subtracted. It is 0 up to rounding, since every softmax sums to 1: sum_v scoring[v] = 0. (Schemes in which it does
    not say why in `no_sum_rule`.)"""
    gradient_VxD = b.gradients[model.scorer]
    rest_D = gradient_VxD.sum(axis=0) - jnp.where(model.tied_at(step), b.lookup.sum(axis=0), 0)
    norm = jnp.linalg.norm(gradient_VxD)
    return jnp.linalg.norm(rest_D) / jnp.where(norm > 0, norm, 1)


def part_norms(push_parts: Params) -> dict[str, Float[Array, "V"]]:
    """L2 norms of the rows of the parts of the push that the scheme tells apart."""
    return {name: row_norm(table_VxD) for name, table_VxD in push_parts.items()}


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

    A scheme's penalty is in the gradients and not in the loss. Where every target is masked, the gradients of the loss
    are 0 and the loss is NaN; inside of jit and other transformations it is 0.

    Args:
        inputs, targets: ids of equal shape, arrays or lists.
        mask: False where a target does not count, and may be any number. Every input is looked up all the same.

    Raises:
        ValueError: the shapes differ, are empty, or something else than integers (booleans for the mask) is in them; or
            an id is not in the vocabulary. Under jit the last cannot be seen: check the ids before.
    """
    inputs, targets, mask = check_ids(model.vocab_size, inputs, targets, mask)
    b = backward(model, params, inputs, targets, mask=mask, rngs=rngs, train=train)
    return mark_undefined(b.mask.any(), b.loss), b.gradients, stats_of(b).marked() if rows else None


def row_stats(model: VocabularyModel, params: PyTree, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]) -> RowStats:
    """Norms, cosines and counts of the rows for one batch; arguments and errors as in `loss_and_gradients`.

    >>> import jax.numpy as jnp
    >>> from tied_lm import TiedEmbedding
    >>> params = {"embedding": jnp.array([[1., 0.], [2., 0.], [0., 1.]])}
    >>> stats = row_stats(TiedEmbedding(3, 2), params, jnp.array([0, 2, 0]), jnp.array([2, 0, 1]))
    >>> stats.input_count.tolist(), stats.target_count.tolist()
    ([2, 0, 1], [1, 1, 1])
    >>> bool(stats.lookup[1] == 0), bool(stats.scoring[1] > 0)  # never looked up, yet scored
    (True, True)
    """
    inputs, targets, _ = check_ids(model.vocab_size, inputs, targets)
    return stats_of(backward(model, params, inputs, targets)).marked()


def split_gradients(
    model: VocabularyModel, params: PyTree, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]
) -> GradientSplit:
    """The split as dense float32 tables, for study; arguments and errors as in `loss_and_gradients`."""
    inputs, targets, _ = check_ids(model.vocab_size, inputs, targets)
    b = backward(model, params, inputs, targets)
    t = tables(b)
    return GradientSplit(b.loss, **split_of(t)._asdict(), push_parts=t.push_parts, others=b.others)
