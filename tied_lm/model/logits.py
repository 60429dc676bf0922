"""The scores of a large vocabulary, made for blocks of tokens, so that N x V of them never exist together.

The letters in names and shapes: N tokens, V rows of the vocabulary, D width, B blocks, C tokens in a block.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from tied_lm.model.mesh import Layout

T = TypeVar("T")

LOGITS_BYTES = 2**29  # of the logits that a GPU or TPU holds at a time


def block_count(tokens: int, vocabulary_size: int, width: int, block_tokens: int = 0) -> int:
    """The number of blocks that the tokens are taken in, of so many tokens, or by the rule; 1 is the dense form.

    Every block adds to a D x V table, so it needs about as many tokens as D to be worth that. Beyond this, logits of
    a few million entries keep a device busy and its memory small.
    """
    if block_tokens:
        return -(-tokens // block_tokens)
    return max(1, tokens // max(width, 128, 2**21 // vocabulary_size))


def bounded_count(tokens: int, vocabulary_size: int, block_tokens: int = 0) -> int:
    """The same on a GPU or TPU, where by the rule blocks are as few as their bytes allow, of at least 16 tokens."""
    most = LOGITS_BYTES // (4 * vocabulary_size) // 16 * 16
    return -(-tokens // (block_tokens or max(16, most)))


def by_device(compute: Callable[..., T], on_cpu: int, elsewhere: int) -> Callable[..., T]:
    """What takes a number of blocks first, with that of the device for which a program is made."""
    if on_cpu == elsewhere:
        return partial(compute, on_cpu)
    return lambda *arrays: lax.platform_dependent(
        *arrays, cpu=partial(compute, on_cpu), default=partial(compute, elsewhere)
    )


def to_blocks(x_Nx: Array, blocks: int) -> Array:
    """(N, ...) -> (B, C, ...), padded with zeros.

    Block b has the tokens b, b + B, b + 2B, ...: if the tokens lie on several devices, then each block does, too.
    """
    block_tokens = -(-x_Nx.shape[0] // blocks)
    if blocks > 1:
        block_tokens = -(-block_tokens // 16) * 16
    padding = [(0, blocks * block_tokens - x_Nx.shape[0])] + [(0, 0)] * (x_Nx.ndim - 1)
    return jnp.pad(x_Nx, padding).reshape(block_tokens, blocks, *x_Nx.shape[1:]).swapaxes(0, 1)


def from_blocks(x_BxCx: Array, tokens: int) -> Array:
    """Undoes `to_blocks`."""
    return x_BxCx.swapaxes(0, 1).reshape(-1, *x_BxCx.shape[2:])[:tokens]


def matmul(a: Array, b: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """The product over the given axes, summed in float32. GPUs and TPUs round float32 operands unless told not to;
    `jax.default_matmul_precision` may allow it."""
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    said = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    precision = lax.Precision.HIGHEST if said is None and a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


def as_it_is_on_cpu(x: Array) -> Array:
    """The array, which XLA:CPU has to make as it stands; for other devices the compiler is left free."""
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def block_logits(h_CxD: Array, rounded_VxD: Array, soft_cap: float | None) -> Array:
    """What is scored, from h and rows in the dtype of the product."""
    logits_CxV = matmul(h_CxD.astype(rounded_VxD.dtype), rounded_VxD, (1, 1))
    return logits_CxV if soft_cap is None else soft_cap * jnp.tanh(logits_CxV / soft_cap)


def exponentials(logits_CxV: Array, soft_cap: float | None, layout: Layout) -> tuple[Array, Array, Array]:
    """exp(logit - largest logit) times d(logit)/d(product), the sum of the former, and the log-sum-exp of logits."""
    rows_CxV = layout.only_rows(logits_CxV)
    largest_C = layout.largest_of_rows(rows_CxV.max(axis=1))
    exp_CxV = jnp.exp(rows_CxV - largest_C[:, None])
    sum_C = layout.sum_of_rows(exp_CxV.sum(axis=1))
    if soft_cap is not None:
        # Of the logits of padding, too: 0 times a slope of minus infinity would be NaN.
        exp_CxV *= 1 - (logits_CxV / soft_cap) ** 2
    return exp_CxV, sum_C, largest_C + jnp.log(sum_C)


def at_targets(
    h_NxD: Array,
    scoring_VxD: Array,
    targets_N: Array,
    soft_cap: float | None,
    compute_dtype: DTypeLike,
    layout: Layout,
) -> tuple[Array, Array, Array]:
    """The rows of the targets that are here, and 0 for the others; the logits of all targets, from operands rounded as
    in the products; and d(logit)/d(product)."""
    rows_NxD = layout.rows_at(scoring_VxD, targets_N).astype(jnp.float32)
    # XLA may drop a cast and its inverse, but not this.
    bits = jnp.finfo(compute_dtype)
    h_NxD, rounded_NxD = (lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant) for x in (h_NxD, rows_NxD))
    logits_N = layout.sum_of_rows((h_NxD * rounded_NxD).sum(axis=1))
    if soft_cap is None:
        return rows_NxD, logits_N, jnp.ones_like(logits_N)
    capped_N = jnp.tanh(logits_N / soft_cap)
    return rows_NxD, soft_cap * capped_N, 1 - capped_N**2
