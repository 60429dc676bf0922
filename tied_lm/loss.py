"""Exact cross-entropy over the vocabulary, with its gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class VocabularyLoss(NamedTuple):
    """The loss of each token, and the gradients of sum_t w_t nll_t that involve every row."""

    nll: Float[Array, "N"]  # -log softmax(h_t S^T)[y_t], nats
    hidden: Float[Array, "N D"]  # d(sum_t w_t nll_t) / dh
    expected: Float[Array, "V D"]  # sum_t w_t p_t[v] h_t; what the targets subtract from it is left to the caller


def negative_log_likelihood(
    h_NxD: Float[Array, "N D"], scoring_VxD: Float[Array, "V D"], targets_N: Int[Array, "N"]
) -> Float[Array, "N"]:
    """-log softmax(h S^T)[y] of each token, in nats."""
    logits_NxV = h_NxD @ scoring_VxD.T
    return jax.nn.logsumexp(logits_NxV, axis=-1) - jnp.sum(h_NxD * scoring_VxD[targets_N], axis=-1)


def vocabulary_loss(
    h_NxD: Float[Array, "N D"],
    scoring_VxD: Float[Array, "V D"],
    targets_N: Int[Array, "N"],
    weights_N: Float[Array, "N"],
) -> VocabularyLoss:
    """Loss and gradients in one pass; the weights are those of the mean, 0 for masked tokens."""
    logits_NxV = h_NxD @ scoring_VxD.T
    peak_N = logits_NxV.max(axis=-1)
    exp_NxV = jnp.exp(logits_NxV - peak_N[:, None])
    sum_N = exp_NxV.sum(axis=-1)
    target_NxD = scoring_VxD[targets_N]
    nll_N = jnp.log(sum_N) + peak_N - jnp.sum(h_NxD * target_NxD, axis=-1)
    hidden_NxD = (exp_NxV @ scoring_VxD / sum_N[:, None] - target_NxD) * weights_N[:, None]
    expected_VxD = exp_NxV.T @ (h_NxD * (weights_N / sum_N)[:, None])
    return VocabularyLoss(nll_N, hidden_NxD, expected_VxD)
