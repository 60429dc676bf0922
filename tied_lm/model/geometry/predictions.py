"""What a scoring matrix makes of hidden vectors: how large the logits are, how right the probabilities, and how much of
the gradient in the logits the matrix lets through."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64, Int

from tied_lm.bands import bands_of
from tied_lm.model.arguments import check_ids
from tied_lm.model.geometry.arrays import AnyArray, by_band, principal_axes, row_vector, rows_of, whitening
from tied_lm.model.logits import as_it_is_on_cpu, block_count

BINS = 15
SPACE = 2**25  # entries of p - y that are projected at most


class Predictions(NamedTuple):
    """Means over tokens, in nats where a unit is due."""

    log_ratio_by_band: dict[str, float]  # mean of log(p / f) over the rows of the band; {} without frequencies
    largest_logit_mean: float
    largest_logit_max: float
    log_sum_exp_mean: float
    log_sum_exp_max: float
    calibration_error: float
    column_space_share: float
    column_space_share_by_chance: float  # rank / V: that of a gradient in a random direction
    entropy: float
    tokens: int
    column_space_tokens: int  # that `column_space_share` is over: all, or of many as many as 2**25 / V


class TokenStats(NamedTuple):
    largest: Float[AnyArray, "C"]
    log_sum: Float[AnyArray, "C"]
    confidence: Float[AnyArray, "C"]
    is_right: Bool[AnyArray, "C"]
    entropy: Float[AnyArray, "C"]


def measure_predictions(
    h: Float[AnyArray, "N D"],
    scoring: Float[AnyArray, "V D"],
    targets: Int[AnyArray, "N"],
    frequencies: Float[AnyArray, "V"] | None = None,
    *,
    soft_cap: float | None = None,
) -> Predictions:
    """What is predicted where logits are h S^T, or c tanh(h S^T / c) under a `soft_cap` c. Nothing is sampled but the
    tokens of `column_space_share`.

    log_ratio_by_band: p is the mean probability of a row over the tokens, f its frequency. Below 0 rows are
        under-predicted. Rows of frequency 0 are left out.
    calibration_error: the expected calibration error of Guo et al. (2017, arXiv:1706.04599), with 15 bins of equal
        width: sum over bins of (tokens in it / tokens) |share that is right - mean confidence|, where confidence is the
        largest probability.
    column_space_share: sum over tokens of |P (p - y)|^2 over that of |p - y|^2, P the projection on the column space of
        S: only this part of the gradient in the logits reaches h (Godey and Artzi 2026, arXiv:2603.10145).
    entropy: of the predicted distribution.

    Computed in float32, in blocks of tokens: no more than a block of N x V values is held.

    Args:
        h, scoring: what `hidden` of a model gives: `model.apply({"params": params}, ids, method="hidden")`.
        frequencies: of each row in the training data, up to a factor.

    Raises:
        ValueError: shapes do not fit, values are not finite, or a target is not in the vocabulary.

    >>> import numpy as np
    >>> found = measure_predictions(np.zeros((2, 3)), np.eye(5, 3), np.array([0, 4]))
    >>> round(found.entropy, 4), found.column_space_share_by_chance  # log 5, and 3 / 5
    (1.6094, 0.6)
    """
    scoring_VxD, h_NxD = rows_of("scoring", scoring), rows_of("h", h)
    rows, width = scoring_VxD.shape
    tokens = len(h_NxD)
    if h_NxD.shape[1] != width:
        raise ValueError(f"h {h_NxD.shape} and scoring {scoring_VxD.shape} differ in width")
    targets_N, _, _ = check_ids(rows, targets, targets)
    if targets_N.shape != (tokens,):
        raise ValueError(f"targets has shape {targets_N.shape}, and h has {tokens} rows")
    hidden_NxD, scores_VxD = (jnp.asarray(matrix, jnp.float32) for matrix in (h_NxD, scoring_VxD))
    block_tokens = -(-tokens // block_count(tokens, rows, width))
    probability_V, blocks = np.zeros(rows), []
    for start in range(0, tokens, block_tokens):
        block = slice(start, start + block_tokens)
        stats, sum_V = _block(hidden_NxD[block], scores_VxD, targets_N[block], soft_cap)
        blocks.append(jax.device_get(stats))
        probability_V += np.asarray(sum_V, np.float64) / tokens
    basis_VxR = (scoring_VxD @ whitening(*principal_axes(scoring_VxD))).astype(np.float32)
    judged_J = np.linspace(0, tokens - 1, min(tokens, max(1, SPACE // rows))).astype(int)
    squares = []
    for block_C in np.array_split(judged_J, -(-judged_J.size // block_tokens)):
        squares.append(_squares(hidden_NxD[block_C], scores_VxD, basis_VxR, targets_N[block_C], soft_cap))
    gradient, inside = np.concatenate(squares, axis=1).astype(np.float64).sum(axis=1)
    found = TokenStats(*(np.concatenate(values).astype(np.float64) for values in zip(*blocks, strict=True)))
    return Predictions(
        log_ratio_by_band={} if frequencies is None else _log_ratios(probability_V, frequencies),
        largest_logit_mean=float(found.largest.mean()),
        largest_logit_max=float(found.largest.max()),
        log_sum_exp_mean=float(found.log_sum.mean()),
        log_sum_exp_max=float(found.log_sum.max()),
        calibration_error=_calibration_error(found.confidence, found.is_right),
        column_space_share=float(inside / (gradient or np.nan)),
        column_space_share_by_chance=basis_VxR.shape[1] / rows,
        entropy=float(found.entropy.mean()),
        tokens=tokens,
        column_space_tokens=judged_J.size,
    )


def _products(h_CxD: Float[Array, "C D"], scoring_VxD: Float[Array, "V D"]) -> Float[Array, "C V"]:
    return jnp.matmul(h_CxD, scoring_VxD.T, precision=jax.lax.Precision.HIGHEST)


def _exponentials(
    products_CxV: Float[Array, "C V"], largest_C: Float[Array, "C"], soft_cap: float | None
) -> tuple[Float[Array, "C V"], Float[Array, "C"], Float[Array, "C V"]]:
    """Logits less the largest one, that one, and the exponentials of the former."""
    if soft_cap is not None:
        products_CxV, largest_C = (soft_cap * jnp.tanh(x / soft_cap) for x in (products_CxV, largest_C))
    below_CxV = products_CxV - largest_C[:, None]
    # Made once, since the sums of it that follow would each make it anew.
    return below_CxV, largest_C, as_it_is_on_cpu(jnp.exp(below_CxV))


@partial(jax.jit, static_argnames="soft_cap")
def _block(
    h_CxD: Float[Array, "C D"], scoring_VxD: Float[Array, "V D"], targets_C: Int[Array, "C"], soft_cap: float | None
) -> tuple[TokenStats, Float[Array, "V"]]:
    """Statistics of a block of tokens, and the sum of their probabilities."""
    products_CxV = _products(h_CxD, scoring_VxD)
    most_C = products_CxV.max(axis=1)
    of_target_C = jnp.take_along_axis(products_CxV, targets_C[:, None], axis=1)[:, 0]
    is_before_CxV = (products_CxV == most_C[:, None]) & (jnp.arange(len(scoring_VxD)) < targets_C[:, None])
    below_CxV, largest_C, exp_CxV = _exponentials(products_CxV, most_C, soft_cap)
    sum_C = exp_CxV.sum(axis=1)
    stats = TokenStats(
        largest=largest_C,
        log_sum=largest_C + jnp.log(sum_C),
        confidence=1 / sum_C,
        is_right=(of_target_C == most_C) & ~jnp.any(is_before_CxV, axis=1),  # the first of the largest
        entropy=jnp.log(sum_C) - jnp.sum(exp_CxV * below_CxV, axis=1) / sum_C,
    )
    return stats, jnp.matmul(1 / sum_C, exp_CxV, precision=jax.lax.Precision.HIGHEST)


@partial(jax.jit, static_argnames="soft_cap")
def _squares(
    h_CxD: Float[Array, "C D"],
    scoring_VxD: Float[Array, "V D"],
    basis_VxR: Float[Array, "V R"],
    targets_C: Int[Array, "C"],
    soft_cap: float | None,
) -> Float[Array, "2 C"]:
    """|p - y|^2 of each token, and the part of it in the column space."""
    products_CxV = _products(h_CxD, scoring_VxD)
    _, _, exp_CxV = _exponentials(products_CxV, products_CxV.max(axis=1), soft_cap)
    is_target_CxV = jnp.arange(len(scoring_VxD)) == targets_C[:, None]
    # Of p - 1 at the target no digits are lost where p is near 1: it is what the others have.
    others_CxV = jnp.where(is_target_CxV, 0, exp_CxV)
    gradient_CxV = jnp.where(is_target_CxV, -others_CxV.sum(axis=1)[:, None], exp_CxV) / exp_CxV.sum(axis=1)[:, None]
    along_CxR = jnp.matmul(gradient_CxV, basis_VxR, precision=jax.lax.Precision.HIGHEST)
    return jnp.stack([jnp.sum(gradient_CxV**2, axis=1), jnp.sum(along_CxR**2, axis=1)])


def _log_ratios(probability_V: Float64[np.ndarray, "V"], frequencies: Float[AnyArray, "V"]) -> dict[str, float]:
    frequency_V = row_vector("frequencies", frequencies, probability_V.size)
    frequency_V = frequency_V / frequency_V.sum()
    seen = frequency_V > 0
    return by_band(np.log(probability_V[seen] / frequency_V[seen]), bands_of(frequency_V)[seen])


def _calibration_error(confidence_N: Float[AnyArray, "N"], is_right_N: Float[AnyArray, "N"]) -> float:
    bins_N = np.clip(np.ceil(confidence_N * BINS).astype(int) - 1, 0, BINS - 1)
    return float(np.abs(np.bincount(bins_N, weights=is_right_N - confidence_N)).sum() / bins_N.size)
