"""Exact softmax cross-entropy over a vocabulary, with its gradients, in one pass and bounded memory.

Tokens are taken in blocks. The logits of a block are formed once, turned into exponentials, and used for both
gradients before the next block begins, so that N x V logits never exist together: the gradient is formed in the
forward pass, as in Liger Kernel (arXiv:2410.10989). The letters in names and shapes: N tokens, V rows of the
vocabulary, D width, B blocks, C tokens in a block.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tied_lm.model.logits import (
    as_it_is_on_cpu,
    at_targets,
    block_count,
    block_logits,
    bounded_count,
    by_device,
    exponentials,
    from_blocks,
    matmul,
    to_blocks,
)
from tied_lm.model.mesh import DATA, ONE_DEVICE, VOCAB, Layout


class VocabularyLoss(NamedTuple):
    """The loss and what its gradients are made of, in float32; `vocabulary_loss` has the formulas."""

    nll: Float[Array, "N"]  # -log softmax(logits_t)[y_t], in nats, unweighted
    h_gradient: Float[Array, "N D"]  # d(loss) / dh
    scoring: Float[Array, "V D"]  # d(loss) / dS = expected - data
    expected: Float[Array, "V D"]  # the part of it that involves every row
    data_weight: Float[Array, "N"]  # what h_t is multiplied by in `data`
    own_weight: Float[Array, "N"]  # what h_t is multiplied by in `own`
    token_loss: Float[Array, "N"]  # loss = sum_t w_t token_loss_t; this is nll unless there is a z-loss
    expected_parts: Float[Array, "2 V D"] | None = None  # of marked tokens and of the others


def is_narrow(vocabulary_size: int, width: int, compute_dtype: DTypeLike) -> bool:
    """Whether one dense pass over all tokens is best. In bfloat16 it would round what the blocks keep in float32."""
    return vocabulary_size <= 2 * width and jnp.dtype(compute_dtype) == jnp.float32


def vocabulary_loss(
    h_NxD: Float[Array, "N D"],
    scoring_VxD: Float[Array, "V D"],
    targets_N: Int[Array, "N"],
    weights_N: Float[Array, "N"],
    *,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    compute_dtype: DTypeLike = jnp.float32,
    marks_N: Float[Array, "N"] | None = None,
    block_tokens: int = 0,
    layout: Layout = ONE_DEVICE,
) -> VocabularyLoss:
    """The loss of each token, and the gradients of loss = sum_t w_t token_loss_t, in one pass.

    With z = h S^T, the logits are z, or c tanh(z / c) where `soft_cap` is c (Gemma 2, arXiv:2408.00118), and `slope`
    is d(logit)/dz, 1 without a cap. p = softmax(logits), lse = logsumexp(logits), and with `z_loss` a (PaLM,
    arXiv:2204.02311) token_loss = nll + a lse^2, which makes f = 1 + 2 a lse, 1 without it. Then

        h_gradient[t]  = w_t f_t sum_v p_t[v] slope_t[v] S[v] - data_weight_t S[y_t]
        expected[v]    = sum_t w_t f_t p_t[v] slope_t[v] h_t
        data_weight_t  = w_t slope_t[y_t]
        own_weight_t   = data_weight_t f_t p_t[y_t]

    and with data[v] the sum of data_weight_t h_t, own[v] that of own_weight_t h_t, over the t with y_t = v:

        d(loss)/dS = expected - data,  pull = own - data,  push = expected - own.

    Args:
        h_NxD, scoring_VxD: of any float dtype; h is the hidden state, S the scoring matrix.
        targets_N: y, in [0, V). Any other id makes the token NaN, unless its weight is 0.
        weights_N: w, as a rule mask / sum(mask). A token of weight 0 adds nothing; its nll is finite.
        compute_dtype: what operands of the N x V products are rounded to; sums are float32 whatever it is.
        marks_N: 1 or 0; if given, `expected` is also summed over marked tokens and over the others, which costs one
            product more.
        block_tokens: how many a block has, on each device; 0: by V and D, and on a GPU or TPU `LOGITS_BYTES`.
        layout: of rows and tokens over devices. There the rows may be followed by padding, which has no score.

    Returns float32. Largest errors against float64: of the tables above, pull and push, relative to the largest entry
    of expected and data, and each relative to its own; of h_gradient, relative to its own; of the mean loss, and of the
    nll of one token, in nats. Tokens are uniform, or inputs and targets both Zipf (1 / rank); the logit is the largest
    of all; 160 draws each with D-wide normal rows, half with h independent of S and half with h the rows of S at the
    inputs, as in a tied model without a body; V 256 to 1,000, D 16 to 64, N 512 to 2,048, w = 1/N:

        tokens, logit    float32                              bfloat16
        uniform,  1      2e-7, 2e-6, 8e-8, 2e-6, 9e-7         6e-4, 5e-3, 3e-4, 7e-5, 3e-3
        uniform, 25      1e-6, 7e-6, 2e-6, 4e-6, 1e-5         2e-2, 3e-2, 2e-2, 3e-3, 0.2
        uniform, 80      4e-6, 2e-5, 5e-6, 2e-5, 4e-5         2e-2, 9e-2, 4e-2, 8e-3, 0.4
        Zipf,     1      2e-6, 3e-6, 1e-7, 2e-6, 9e-7         2e-4, 7e-3, 3e-4, 6e-5, 3e-3
        Zipf,    25      3e-6, 1e-5, 2e-6, 3e-6, 1e-5         2e-2, 4e-2, 2e-2, 9e-3, 0.1
        Zipf,    80      3e-6, 3e-5, 6e-6, 1e-5, 5e-5         2e-2, 0.2,  4e-2, 3e-2, 0.5

    In bfloat16 these are the errors of rounding the operands. Where few tokens make up most of the text they share
    their rounded rows, so that the mean loss is off by more than the mean of many independent errors would be.
    Peak temporary memory is about that of C x V logits and two V x D tables.
    """
    rows = layout.vocab_size or scoring_VxD.shape[0]
    h_NxD, weights_N = h_NxD.astype(jnp.float32), weights_N.astype(jnp.float32)
    ids_N = jnp.where(weights_N == 0, targets_N.clip(0, rows - 1), targets_N)
    of_tokens, of_rows, of_parts = PartitionSpec(DATA), PartitionSpec(VOCAB), PartitionSpec(None, VOCAB)
    compute = layout.share_out(
        partial(_loss_of_share, soft_cap, z_loss, compute_dtype, block_tokens, layout),
        (of_tokens, of_rows, of_tokens, of_tokens, of_tokens),
        VocabularyLoss._make((of_tokens, of_tokens, of_rows, of_rows, of_tokens, of_tokens, of_tokens, of_parts)),
    )
    return compute(h_NxD, scoring_VxD, ids_N, weights_N, marks_N)


def _loss_of_share(
    soft_cap: float | None,
    z_loss: float,
    compute_dtype: DTypeLike,
    block_tokens: int,
    layout: Layout,
    h_NxD: Array,
    scoring_VxD: Array,
    ids_N: Array,
    weights_N: Array,
    marks_N: Array | None,
) -> VocabularyLoss:
    """The same for the tokens and rows that one device has. In the loop the devices tell each other C numbers at a
    time; what is N x D or V x D is summed once, after it."""
    (tokens, width), vocabulary_size = h_NxD.shape, scoring_VxD.shape[0]
    if not block_tokens and is_narrow(vocabulary_size, width, compute_dtype):
        return _narrow_loss(h_NxD, scoring_VxD.astype(jnp.float32), ids_N, weights_N, soft_cap, z_loss, layout, marks_N)
    on_cpu = block_count(tokens, vocabulary_size, width, block_tokens)
    elsewhere = bounded_count(tokens, vocabulary_size, block_tokens)
    compute = partial(_loss_in_blocks, soft_cap, z_loss, compute_dtype, layout)
    return by_device(compute, on_cpu, elsewhere)(h_NxD, scoring_VxD, ids_N, weights_N, marks_N)


def _loss_in_blocks(
    soft_cap: float | None,
    z_loss: float,
    compute_dtype: DTypeLike,
    layout: Layout,
    blocks: int,
    h_NxD: Array,
    scoring_VxD: Array,
    ids_N: Array,
    weights_N: Array,
    marks_N: Array | None,
) -> VocabularyLoss:
    """The same in so many blocks."""
    (tokens, width), vocabulary_size = h_NxD.shape, scoring_VxD.shape[0]
    rounded_VxD = scoring_VxD.astype(compute_dtype)

    def add_block(table: Array, block: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        h_CxD, summed, weights_C = block
        exp_CxV, sum_C, log_sum_C = exponentials(block_logits(h_CxD, rounded_VxD, soft_cap), soft_cap, layout)
        exp_CxV = exp_CxV.astype(compute_dtype)
        # Probabilities are never formed: what is C x V costs more to scale than what is C x D.
        scale_C = weights_C * _z_factor(log_sum_C, z_loss) / sum_C
        h_gradient_CxD = matmul(exp_CxV, rounded_VxD) * scale_C[:, None]
        if transposed:
            table += matmul((summed * scale_C).astype(compute_dtype), exp_CxV)
        else:
            table += matmul(exp_CxV, (summed * scale_C[:, None]).astype(compute_dtype), (0, 0))
        return table, (h_gradient_CxD, log_sum_C)

    # A product that contracts the first axis of both operands is slow on XLA:CPU, so the table is summed in transposed
    # form, unless D is so large that the transpositions cost more.
    h_BxCxD = to_blocks(h_NxD, blocks)
    transposed = width <= min(vocabulary_size, h_BxCxD.shape[1])
    summed_BxCxE = h_BxCxD if marks_N is None else to_blocks(_apart(h_NxD, marks_N), blocks)
    summed = as_it_is_on_cpu(summed_BxCxE.swapaxes(1, 2)) if transposed else summed_BxCxE
    shape = (summed_BxCxE.shape[2], vocabulary_size)
    table = jnp.zeros(shape if transposed else shape[::-1], jnp.float32)
    table, outputs = lax.scan(add_block, table, (h_BxCxD, summed, to_blocks(weights_N, blocks)))
    table_VxE = as_it_is_on_cpu(table).T if transposed else table
    parts = None if marks_N is None else jnp.stack(jnp.split(table_VxE, 2, axis=1))
    expected_VxD = table_VxE if parts is None else parts.sum(axis=0)
    h_gradient_NxD, log_sum_N = (from_blocks(x, tokens) for x in outputs)

    target_rows_NxD, target_logits_N, slope_N = at_targets(h_NxD, scoring_VxD, ids_N, soft_cap, compute_dtype, layout)
    nll_N = log_sum_N - target_logits_N
    data_weight_N, own_N = weights_N * slope_N, layout.own(ids_N, vocabulary_size)
    # Rounding can make an nll of large logits negative; a probability is at most 1 all the same.
    return VocabularyLoss(
        nll=nll_N,
        h_gradient=layout.sum_of_rows(h_gradient_NxD - data_weight_N[:, None] * target_rows_NxD),
        scoring=layout.sum_of_tokens(expected_VxD.at[own_N].add(-data_weight_N[:, None] * h_NxD)),
        expected=layout.sum_of_tokens(expected_VxD),
        data_weight=data_weight_N,
        own_weight=data_weight_N * jnp.exp(-jnp.maximum(nll_N, 0)) * _z_factor(log_sum_N, z_loss),
        token_loss=nll_N + z_loss * log_sum_N**2 if z_loss else nll_N,
        expected_parts=None if parts is None else layout.sum_of_tokens(parts),
    )


def _apart(h_NxD: Array, marks_N: Array) -> Array:
    """(N, 2 D): the vectors of marked tokens, then those of the others, each 0 for the rest."""
    return jnp.concatenate([h_NxD * marks_N[:, None], h_NxD * (1 - marks_N[:, None])], axis=1)


def _narrow_loss(
    h_NxD: Array,
    scoring_VxD: Array,
    ids_N: Array,
    weights_N: Array,
    soft_cap: float | None,
    z_loss: float,
    layout: Layout,
    marks_N: Array | None,
) -> VocabularyLoss:
    """The same where V is small beside D: an N x V array is then no burden beside h, which is N x D."""
    logits_NxV = block_logits(h_NxD, scoring_VxD, soft_cap)
    exp_NxV, sum_N, log_sum_N = exponentials(logits_NxV, soft_cap, layout)
    own_N = layout.own(ids_N, scoring_VxD.shape[0])
    is_target_NxV = own_N[:, None] == jnp.arange(scoring_VxD.shape[0])
    target_logits_N = layout.sum_of_rows(jnp.where(is_target_NxV, logits_NxV, 0).sum(axis=1))
    target_logits_N = jnp.where(layout.any_of_rows(is_target_NxV.any(axis=1)), target_logits_N, jnp.nan)
    nll_N = log_sum_N - target_logits_N
    data_weight_N = weights_N if soft_cap is None else weights_N * (1 - (target_logits_N / soft_cap) ** 2)
    factor_N = _z_factor(log_sum_N, z_loss)
    logits_gradient_NxV = exp_NxV * (weights_N * factor_N / sum_N)[:, None]
    parts = None
    if marks_N is not None:
        parts = jnp.stack(jnp.split(matmul(logits_gradient_NxV, _apart(h_NxD, marks_N), (0, 0)), 2, axis=1))
    logits_gradient_NxV -= jnp.where(is_target_NxV, data_weight_N[:, None], 0)
    scoring_gradient_VxD = matmul(logits_gradient_NxV, h_NxD, (0, 0))
    return VocabularyLoss(
        nll=nll_N,
        h_gradient=layout.sum_of_rows(matmul(logits_gradient_NxV, scoring_VxD)),
        scoring=layout.sum_of_tokens(scoring_gradient_VxD),
        expected=layout.sum_of_tokens(scoring_gradient_VxD.at[own_N].add(data_weight_N[:, None] * h_NxD)),
        data_weight=data_weight_N,
        own_weight=data_weight_N * jnp.exp(-jnp.maximum(nll_N, 0)) * factor_N,
        token_loss=nll_N + z_loss * log_sum_N**2 if z_loss else nll_N,
        expected_parts=None if parts is None else layout.sum_of_tokens(parts),
    )


def cross_entropy(
    h_NxD: Float[Array, "N D"],
    scoring_VxD: Float[Array, "V D"],
    targets_N: Int[Array, "N"],
    weights_N: Float[Array, "N"],
    *,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    compute_dtype: DTypeLike = jnp.float32,
) -> Float[Array, ""]:
    """sum_t w_t token_loss_t of `vocabulary_loss`, in nats, for `jax.grad`: reverse mode, of first order.

    Gradients for h, the scoring matrix and the weights come from the one pass, in the dtypes of these arguments. Not
    differentiated and under jit, it is forward only.
    """
    return _cross_entropy(soft_cap, z_loss, compute_dtype, h_NxD, scoring_VxD, targets_N, weights_N)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cross_entropy(
    soft_cap: float | None,
    z_loss: float,
    compute_dtype: DTypeLike,
    h_NxD: Array,
    scoring_VxD: Array,
    targets_N: Array,
    weights_N: Array,
) -> Array:
    result = vocabulary_loss(
        h_NxD, scoring_VxD, targets_N, weights_N, soft_cap=soft_cap, z_loss=z_loss, compute_dtype=compute_dtype
    )
    return (weights_N * result.token_loss).sum()


def _cross_entropy_forward(
    soft_cap: float | None,
    z_loss: float,
    compute_dtype: DTypeLike,
    h_NxD: Array,
    scoring_VxD: Array,
    targets_N: Array,
    weights_N: Array,
) -> tuple[Array, tuple[Array, ...]]:
    result = vocabulary_loss(
        h_NxD, scoring_VxD, targets_N, weights_N, soft_cap=soft_cap, z_loss=z_loss, compute_dtype=compute_dtype
    )
    gradients = (
        result.h_gradient.astype(h_NxD.dtype),
        result.scoring.astype(scoring_VxD.dtype),
        result.token_loss.astype(weights_N.dtype),
    )
    return (weights_N * result.token_loss).sum(), gradients


def _cross_entropy_backward(
    soft_cap: float | None, z_loss: float, compute_dtype: DTypeLike, gradients: tuple[Array, ...], scale: Array
) -> tuple[Array, Array, None, Array]:
    of_h, of_scoring, of_weights = (gradient * scale.astype(gradient.dtype) for gradient in gradients)
    return of_h, of_scoring, None, of_weights


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _z_factor(log_sum: Array, z_loss: float) -> Array | float:
    """d(log-sum-exp + z_loss log-sum-exp^2) / d(log-sum-exp)."""
    return 1 + 2 * z_loss * log_sum if z_loss else 1.0
