"""Exact softmax cross-entropy over a vocabulary, with its gradients, in one pass and bounded memory.

Tokens are taken in blocks. The logits of a block are formed once, turned into exponentials, and used for both
gradients before the next block begins, so that N x V logits never exist together: the gradient is formed in the
forward pass, as in Liger Kernel (arXiv:2410.10989). The letters in names and shapes: N tokens, V rows of the
vocabulary, D width, B blocks, C tokens in a block.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


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


@runtime_checkable
class Law(Protocol):
    """The true distribution of the next token, given the context."""

    def expected(self, values_CxV: Float[Array, "C V"], contexts_C: Int[Array, "C"]) -> Float[Array, "C"]:
        """sum_v p(v | context of c) values[c, v]."""

    def expected_rows(self, rows_VxD: Float[Array, "V D"], contexts_N: Int[Array, "N"]) -> Float[Array, "N D"]:
        """sum_v p(v | context of n) rows[v]; no array N x V is made."""

    def next_entropy(self, contexts_N: Int[Array, "N"]) -> Float[Array, "N"]:
        """-sum_v p(v | context of n) log p(v | context of n), nats."""


def block_count(tokens: int, vocabulary_size: int, width: int) -> int:
    """The number of blocks that the tokens are taken in; 1 is the dense form.

    Every block adds to a D x V table, so it needs about as many tokens as D to be worth that. Beyond this, logits of
    a few million entries keep a device busy and its memory small.
    """
    block_tokens = max(width, 128, 2**21 // vocabulary_size)
    return max(1, tokens // block_tokens)


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
    tokens, width = h_NxD.shape
    vocabulary_size = scoring_VxD.shape[0]
    h_NxD, weights_N = h_NxD.astype(jnp.float32), weights_N.astype(jnp.float32)
    ids_N = jnp.where(weights_N == 0, targets_N.clip(0, vocabulary_size - 1), targets_N)
    if is_narrow(vocabulary_size, width, compute_dtype):
        return _narrow_loss(h_NxD, scoring_VxD.astype(jnp.float32), ids_N, weights_N, soft_cap, z_loss, marks_N)
    blocks = block_count(tokens, vocabulary_size, width)
    rounded_VxD = scoring_VxD.astype(compute_dtype)

    def add_block(table: Array, block: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        h_CxD, summed, weights_C = block
        exp_CxV, sum_C, log_sum_C = _exponentials(_logits(h_CxD, rounded_VxD, soft_cap), soft_cap)
        exp_CxV = exp_CxV.astype(compute_dtype)
        # Probabilities are never formed: what is C x V costs more to scale than what is C x D.
        scale_C = weights_C * _z_factor(log_sum_C, z_loss) / sum_C
        h_gradient_CxD = _matmul(exp_CxV, rounded_VxD) * scale_C[:, None]
        if transposed:
            table += _matmul((summed * scale_C).astype(compute_dtype), exp_CxV)
        else:
            table += _matmul(exp_CxV, (summed * scale_C[:, None]).astype(compute_dtype), (0, 0))
        return table, (h_gradient_CxD, log_sum_C)

    # A product that contracts the first axis of both operands is slow on XLA:CPU, so the table is summed in transposed
    # form, unless D is so large that the transpositions cost more. The barriers keep XLA from undoing this.
    h_BxCxD = _to_blocks(h_NxD, blocks)
    transposed = width <= min(vocabulary_size, h_BxCxD.shape[1])
    summed_BxCxE = h_BxCxD if marks_N is None else _to_blocks(_apart(h_NxD, marks_N), blocks)
    summed = lax.optimization_barrier(summed_BxCxE.swapaxes(1, 2)) if transposed else summed_BxCxE
    shape = (summed_BxCxE.shape[2], vocabulary_size)
    table = jnp.zeros(shape if transposed else shape[::-1], jnp.float32)
    table, outputs = lax.scan(add_block, table, (h_BxCxD, summed, _to_blocks(weights_N, blocks)))
    table_VxE = lax.optimization_barrier(table).T if transposed else table
    parts = None if marks_N is None else jnp.stack(jnp.split(table_VxE, 2, axis=1))
    expected_VxD = table_VxE if parts is None else parts.sum(axis=0)
    h_gradient_NxD, log_sum_N = (_from_blocks(x, tokens) for x in outputs)

    target_rows_NxD, target_logits_N, slope_N = _at_targets(h_NxD, scoring_VxD, ids_N, soft_cap, compute_dtype)
    nll_N = log_sum_N - target_logits_N
    data_weight_N = weights_N * slope_N
    # Rounding can make an nll of large logits negative; a probability is at most 1 all the same.
    return VocabularyLoss(
        nll=nll_N,
        h_gradient=h_gradient_NxD - data_weight_N[:, None] * target_rows_NxD,
        scoring=expected_VxD.at[ids_N].add(-data_weight_N[:, None] * h_NxD),
        expected=expected_VxD,
        data_weight=data_weight_N,
        own_weight=data_weight_N * jnp.exp(-jnp.maximum(nll_N, 0)) * _z_factor(log_sum_N, z_loss),
        token_loss=nll_N + z_loss * log_sum_N**2 if z_loss else nll_N,
        expected_parts=parts,
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
    marks_N: Array | None,
) -> VocabularyLoss:
    """The same where V is small beside D: an N x V array is then no burden beside h, which is N x D."""
    logits_NxV = _logits(h_NxD, scoring_VxD, soft_cap)
    exp_NxV, sum_N, log_sum_N = _exponentials(logits_NxV, soft_cap)
    is_target_NxV = ids_N[:, None] == jnp.arange(scoring_VxD.shape[0])
    target_logits_N = jnp.where(is_target_NxV.any(axis=1), jnp.where(is_target_NxV, logits_NxV, 0).sum(axis=1), jnp.nan)
    nll_N = log_sum_N - target_logits_N
    data_weight_N = weights_N if soft_cap is None else weights_N * (1 - (target_logits_N / soft_cap) ** 2)
    factor_N = _z_factor(log_sum_N, z_loss)
    logits_gradient_NxV = exp_NxV * (weights_N * factor_N / sum_N)[:, None]
    parts = None
    if marks_N is not None:
        parts = jnp.stack(jnp.split(_matmul(logits_gradient_NxV, _apart(h_NxD, marks_N), (0, 0)), 2, axis=1))
    logits_gradient_NxV -= jnp.where(is_target_NxV, data_weight_N[:, None], 0)
    scoring_gradient_VxD = _matmul(logits_gradient_NxV, h_NxD, (0, 0))
    return VocabularyLoss(
        nll=nll_N,
        h_gradient=_matmul(logits_gradient_NxV, scoring_VxD),
        scoring=scoring_gradient_VxD,
        expected=scoring_gradient_VxD.at[ids_N].add(data_weight_N[:, None] * h_NxD),
        data_weight=data_weight_N,
        own_weight=data_weight_N * jnp.exp(-jnp.maximum(nll_N, 0)) * factor_N,
        token_loss=nll_N + z_loss * log_sum_N**2 if z_loss else nll_N,
        expected_parts=parts,
    )


def negative_log_likelihood(
    h_NxD: Float[Array, "N D"],
    scoring_VxD: Float[Array, "V D"],
    targets_N: Int[Array, "N"],
    *,
    soft_cap: float | None = None,
    compute_dtype: DTypeLike = jnp.float32,
) -> Float[Array, "N"]:
    """-log softmax(logits)[y] of each token, in nats, float32; arguments and errors as in `vocabulary_loss`.

    Forward only, in the same blocks. A target outside [0, V) makes its token NaN.
    """
    return likelihood(h_NxD, scoring_VxD, targets_N, soft_cap=soft_cap, compute_dtype=compute_dtype)[0]


def likelihood(
    h_NxD: Float[Array, "N D"],
    scoring_VxD: Float[Array, "V D"],
    targets_N: Int[Array, "N"],
    *,
    soft_cap: float | None = None,
    compute_dtype: DTypeLike = jnp.float32,
    law: Law | None = None,
    contexts_N: Int[Array, "N"] | None = None,
) -> tuple[Float[Array, "N"], Float[Array, "N"] | None]:
    """The negative log-likelihood of each token, and the divergence of the model from the true law in its context.

    The divergence is KL(p || softmax(logits)) = logsumexp(logits) - sum_v p[v] logit[v] - H(p), in nats. Without a cap
    the sum is h . (sum_v p[v] S[v]), with one it is taken in the blocks. Rounding could make it negative; it is 0 then.

    Args:
        law, contexts_N: the law and what it is given for each token; without them there is no divergence.
    """
    tokens, width = h_NxD.shape
    rounded_VxD = scoring_VxD.astype(compute_dtype)
    blocks = block_count(tokens, scoring_VxD.shape[0], width)
    in_blocks = law is not None and contexts_N is not None and soft_cap is not None

    def block(h_CxD: Array, contexts_C: Array | None) -> tuple[Array, Array | None]:
        logits_CxV = _logits(h_CxD, rounded_VxD, soft_cap)
        expected_C = None if law is None or contexts_C is None else law.expected(logits_CxV, contexts_C)
        return jax.nn.logsumexp(logits_CxV, axis=1), expected_C

    inputs = (
        _to_blocks(h_NxD, blocks),
        _to_blocks(contexts_N, blocks) if in_blocks and contexts_N is not None else None,
    )
    log_sum_N, expected_N = jax.tree.map(lambda x: _from_blocks(x, tokens), lax.map(lambda x: block(*x), inputs))
    nll_N = log_sum_N - _at_targets(h_NxD, scoring_VxD, targets_N, soft_cap, compute_dtype)[1]
    if law is None or contexts_N is None:
        return nll_N, None
    if expected_N is None:
        h_NxD = h_NxD.astype(compute_dtype).astype(jnp.float32)
        expected_N = (h_NxD * law.expected_rows(rounded_VxD.astype(jnp.float32), contexts_N)).sum(axis=1)
    return nll_N, jnp.maximum(log_sum_N - expected_N - law.next_entropy(contexts_N), 0)


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


def _to_blocks(x_Nx: Array, blocks: int) -> Array:
    """(N, ...) -> (B, C, ...), padded with zeros.

    Block b has the tokens b, b + B, b + 2B, ...: if the tokens lie on several devices, then each block does, too.
    """
    block_tokens = -(-x_Nx.shape[0] // blocks)
    if blocks > 1:
        block_tokens = -(-block_tokens // 16) * 16
    padding = [(0, blocks * block_tokens - x_Nx.shape[0])] + [(0, 0)] * (x_Nx.ndim - 1)
    return jnp.pad(x_Nx, padding).reshape(block_tokens, blocks, *x_Nx.shape[1:]).swapaxes(0, 1)


def _from_blocks(x_BxCx: Array, tokens: int) -> Array:
    """Undoes `_to_blocks`."""
    return x_BxCx.swapaxes(0, 1).reshape(-1, *x_BxCx.shape[2:])[:tokens]


def _matmul(a: Array, b: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """The product over the given axes, summed in float32. GPUs and TPUs round float32 operands unless told not to."""
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


def _logits(h_CxD: Array, rounded_VxD: Array, soft_cap: float | None) -> Array:
    logits_CxV = _matmul(h_CxD.astype(rounded_VxD.dtype), rounded_VxD, (1, 1))
    return logits_CxV if soft_cap is None else soft_cap * jnp.tanh(logits_CxV / soft_cap)


def _exponentials(logits_CxV: Array, soft_cap: float | None) -> tuple[Array, Array, Array]:
    """exp(logit - largest logit) times d(logit)/d(product), the sum of the former, and the log-sum-exp of logits."""
    largest_C = logits_CxV.max(axis=1)
    exp_CxV = jnp.exp(logits_CxV - largest_C[:, None])
    sum_C = exp_CxV.sum(axis=1)
    if soft_cap is not None:
        exp_CxV *= 1 - (logits_CxV / soft_cap) ** 2
    return exp_CxV, sum_C, largest_C + jnp.log(sum_C)


def _at_targets(
    h_NxD: Array, scoring_VxD: Array, targets_N: Array, soft_cap: float | None, compute_dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    """The rows of the targets, their logits from operands rounded as in the products, and d(logit)/d(product)."""
    vocabulary_size = scoring_VxD.shape[0]
    ids_N = jnp.where(targets_N < 0, vocabulary_size, targets_N)
    rows_NxD = jnp.take(scoring_VxD, ids_N, axis=0, mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    # XLA may drop a cast and its inverse, but not this.
    bits = jnp.finfo(compute_dtype)
    h_NxD, rounded_NxD = (lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant) for x in (h_NxD, rows_NxD))
    logits_N = (h_NxD * rounded_NxD).sum(axis=1)
    if soft_cap is None:
        return rows_NxD, logits_N, jnp.ones_like(logits_N)
    capped_N = jnp.tanh(logits_N / soft_cap)
    return rows_NxD, soft_cap * capped_N, 1 - capped_N**2


def _z_factor(log_sum: Array, z_loss: float) -> Array | float:
    """d(log-sum-exp + z_loss log-sum-exp^2) / d(log-sum-exp)."""
    return 1 + 2 * z_loss * log_sum if z_loss else 1.0
