"""How likely tokens are, and how far that is from what is known of them: forward only, in blocks."""

import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tied_lm.model.logits import at_targets, block_count, block_logits, bounded_count, by_device, from_blocks, to_blocks
from tied_lm.model.mesh import DATA, ONE_DEVICE, VOCAB, Layout


@runtime_checkable
class Law(Protocol):
    """The true distribution of the next token, given the context."""

    def expected(
        self, values_CxV: Float[Array, "C V"], contexts_C: Int[Array, "C"], first: int | Int[Array, ""] = 0
    ) -> Float[Array, "C"]:
        """sum_v p(v | context of c) values[c, v], the values being those of the tokens from `first` on."""

    def expected_rows(
        self, rows_VxD: Float[Array, "V D"], contexts_N: Int[Array, "N"], first: int | Int[Array, ""] = 0
    ) -> Float[Array, "N D"]:
        """sum_v p(v | context of n) rows[v] likewise; no array N x V is made."""

    def next_entropy(self, contexts_N: Int[Array, "N"]) -> Float[Array, "N"]:
        """-sum_v p(v | context of n) log p(v | context of n), nats."""


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
    block_tokens: int = 0,
    layout: Layout = ONE_DEVICE,
) -> tuple[Float[Array, "N"], Float[Array, "N"] | None]:
    """The negative log-likelihood of each token, and the divergence of the model from the true law in its context.

    The divergence is KL(p || softmax(logits)) = logsumexp(logits) - sum_v p[v] logit[v] - H(p), in nats. Without a cap
    the sum is h . (sum_v p[v] S[v]), with one it is taken in the blocks. Rounding could make it negative; it is 0 then.

    Args:
        law, contexts_N: the law and what it is given for each token; without them there is no divergence.
        block_tokens, layout: as in `vocabulary_loss`.
    """
    if law is None or contexts_N is None:
        law = contexts_N = None
    compute = functools.partial(_likelihood_of_share, soft_cap, compute_dtype, block_tokens, layout)
    tokens, rows = PartitionSpec(DATA), PartitionSpec(VOCAB)
    share_out = layout.share_out(compute, (tokens, rows, tokens, PartitionSpec(), tokens), tokens)
    return share_out(h_NxD, scoring_VxD, targets_N, law, contexts_N)


def _likelihood_of_share(
    soft_cap: float | None,
    compute_dtype: DTypeLike,
    block_tokens: int,
    layout: Layout,
    h_NxD: Array,
    scoring_VxD: Array,
    targets_N: Array,
    law: Law | None,
    contexts_N: Array | None,
) -> tuple[Array, Array | None]:
    """The same for the tokens that one device has."""
    (tokens, width), rows = h_NxD.shape, scoring_VxD.shape[0]
    counts = block_count(tokens, rows, width, block_tokens), bounded_count(tokens, rows, block_tokens)
    compute = functools.partial(_likelihood_in_blocks, soft_cap, compute_dtype, layout)
    return by_device(compute, *counts)(h_NxD, scoring_VxD, targets_N, law, contexts_N)


def _likelihood_in_blocks(
    soft_cap: float | None,
    compute_dtype: DTypeLike,
    layout: Layout,
    blocks: int,
    h_NxD: Array,
    scoring_VxD: Array,
    targets_N: Array,
    law: Law | None,
    contexts_N: Array | None,
) -> tuple[Array, Array | None]:
    """The same in so many blocks."""
    tokens = h_NxD.shape[0]
    rounded_VxD = scoring_VxD.astype(compute_dtype)
    in_blocks = law is not None and soft_cap is not None
    first = layout.first_row(scoring_VxD.shape[0])

    def block(h_CxD: Array, contexts_C: Array | None) -> tuple[Array, Array | None]:
        logits_CxV = block_logits(h_CxD, rounded_VxD, soft_cap)
        log_sum_C = layout.log_sum_of_rows(jax.nn.logsumexp(layout.only_rows(logits_CxV), axis=1))
        if law is None or contexts_C is None:
            return log_sum_C, None
        return log_sum_C, layout.sum_of_rows(law.expected(logits_CxV, contexts_C, first))

    inputs = (
        to_blocks(h_NxD, blocks),
        to_blocks(contexts_N, blocks) if in_blocks and contexts_N is not None else None,
    )
    log_sum_N, expected_N = jax.tree.map(lambda x: from_blocks(x, tokens), lax.map(lambda x: block(*x), inputs))
    nll_N = log_sum_N - at_targets(h_NxD, scoring_VxD, targets_N, soft_cap, compute_dtype, layout)[1]
    if law is None or contexts_N is None:
        return nll_N, None
    if expected_N is None:
        h_NxD = h_NxD.astype(compute_dtype).astype(jnp.float32)
        expected_NxD = law.expected_rows(rounded_VxD.astype(jnp.float32), contexts_N, first)
        expected_N = layout.sum_of_rows((h_NxD * expected_NxD).sum(axis=1))
    return nll_N, jnp.maximum(log_sum_N - expected_N - law.next_entropy(contexts_N), 0)
