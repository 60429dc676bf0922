"""What a scoring matrix makes of hidden vectors: how large the logits are, how right the probabilities, and how much of
the gradient in the logits the matrix lets through."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float64, Int

from tied_lm.bands import bands_of
from tied_lm.model.arguments import check_ids
from tied_lm.model.geometry.arrays import AnyArray, by_band, principal_axes, row_vector, rows_of, whitening
from tied_lm.model.logits import as_it_is_on_cpu, block_count, bounded_count, by_device, from_blocks, matmul, to_blocks
from tied_lm.model.mesh import DATA, ONE_DEVICE, VOCAB, Layout

BINS = 15
NOTHING = -200.0  # a logit so far below the largest has an exponential of 0 in float32


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


class TokenStats(NamedTuple):
    """Of each token; those that are not `counted` have no meaning."""

    largest: Float[AnyArray, "N"]  # logit
    log_sum: Float[AnyArray, "N"]
    confidence: Float[AnyArray, "N"]
    is_right: Bool[AnyArray, "N"]
    entropy: Float[AnyArray, "N"]
    square: Float[AnyArray, "N"]  # |p - y|^2
    counted: Bool[AnyArray, "N"]


class Seen(NamedTuple):
    """What the device makes of tokens."""

    tokens: TokenStats
    probability: Float[AnyArray, "V"]  # summed over the tokens
    along: Float[AnyArray, "R R"]  # sum over the tokens of a a^T, with a the products of p - y with some directions


def measure_predictions(
    h: Float[AnyArray, "N D"],
    scoring: Float[AnyArray, "V D"],
    targets: Int[AnyArray, "N"],
    frequencies: Float[AnyArray, "V"] | None = None,
    *,
    soft_cap: float | None = None,
) -> Predictions:
    """What is predicted where logits are h S^T, or c tanh(h S^T / c) under a `soft_cap` c. Nothing is sampled.

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
    basis_VxR = scoring_VxD @ whitening(*principal_axes(scoring_VxD))
    hidden_NxD, scores_VxD, basis_VxR = (np.asarray(x, np.float32) for x in (h_NxD, scoring_VxD, basis_VxR))
    blocks = block_count(tokens, rows, width)
    seen = _look(soft_cap, ONE_DEVICE, blocks, hidden_NxD, scores_VxD, basis_VxR, targets_N, np.ones(tokens, bool))
    return predictions_of(jax.device_get(seen), frequencies, np.eye(basis_VxR.shape[1]))


def predictions_of(
    seen: Seen, frequencies: Float[AnyArray, "V"] | None, whitening_DxR: Float64[np.ndarray, "D R"]
) -> Predictions:
    """Predictions from what a device made of tokens.

    Args:
        whitening_DxR: what makes an orthonormal basis of the column space of the directions.
    """
    counted_N = np.asarray(seen.tokens.counted)
    found = TokenStats(*(np.asarray(values_N)[counted_N].astype(np.float64) for values_N in seen.tokens))
    tokens, probability_V = found.counted.size, np.asarray(seen.probability, np.float64)
    inside = np.sum((np.asarray(seen.along, np.float64) @ whitening_DxR) * whitening_DxR)
    return Predictions(
        log_ratio_by_band={} if frequencies is None else _log_ratios(probability_V / tokens, frequencies),
        largest_logit_mean=float(found.largest.mean()),
        largest_logit_max=float(found.largest.max()),
        log_sum_exp_mean=float(found.log_sum.mean()),
        log_sum_exp_max=float(found.log_sum.max()),
        calibration_error=_calibration_error(found.confidence, found.is_right),
        column_space_share=float(inside / (found.square.sum() or np.nan)),
        column_space_share_by_chance=whitening_DxR.shape[1] / probability_V.size,
        entropy=float(found.entropy.mean()),
        tokens=tokens,
    )


def look(
    h_NxD: Float[Array, "N D"],
    scoring_VxD: Float[Array, "V D"],
    targets_N: Int[Array, "N"],
    mask_N: Bool[Array, "N"],
    *,
    soft_cap: float | None,
    block_tokens: int,
    layout: Layout,
) -> Seen:
    """What the device makes of tokens, those where the mask is False left out; the directions are the columns of S.

    Args:
        block_tokens, layout: as in `vocabulary_loss`.
    """
    (tokens, width), rows = h_NxD.shape, scoring_VxD.shape[0]
    of_tokens, of_rows = PartitionSpec(DATA), PartitionSpec(VOCAB)
    tokens //= 1 if layout.mesh is None else layout.mesh.shape[DATA]
    rows //= 1 if layout.mesh is None else layout.mesh.shape[VOCAB]
    counts = block_count(tokens, rows, width, block_tokens), bounded_count(tokens, rows, block_tokens)
    compute = layout.share_out(
        by_device(partial(_look_in_blocks, soft_cap, layout), *counts),
        (of_tokens, of_rows, of_rows, of_tokens, of_tokens),
        Seen._make((TokenStats._make([of_tokens] * len(TokenStats._fields)), of_rows, PartitionSpec())),
    )
    return compute(h_NxD.astype(jnp.float32), scoring_VxD, scoring_VxD, targets_N, mask_N)


def _look_in_blocks(
    soft_cap: float | None,
    layout: Layout,
    blocks: int,
    h_NxD: Array,
    scoring_VxD: Array,
    directions_VxR: Array,
    targets_N: Array,
    mask_N: Array,
) -> Seen:
    """The same for the tokens and rows that one device has, in so many blocks, with directions of any number."""
    rows, tokens = len(scoring_VxD), len(h_NxD)
    ids_V = layout.first_row(rows) + jnp.arange(rows)

    def capped(products: Array) -> Array:
        return products if soft_cap is None else soft_cap * jnp.tanh(products / soft_cap)

    def add_block(sums: tuple[Array, Array], block: tuple[Array, ...]) -> tuple[tuple[Array, Array], TokenStats]:
        probability_V, along_RxR = sums
        h_CxD, targets_C, mask_C = block
        own_C = layout.own(targets_C, rows)
        products_CxV = layout.only_rows(matmul(h_CxD, scoring_VxD, (1, 1)))
        most_C = layout.largest_of_rows(products_CxV.max(axis=1))
        taken_Cx1 = jnp.take_along_axis(products_CxV, own_C[:, None], axis=1, mode="fill", fill_value=-jnp.inf)
        of_target_C = layout.largest_of_rows(taken_Cx1[:, 0])
        is_before_CxV = (products_CxV == most_C[:, None]) & (ids_V < targets_C[:, None])
        largest_C = capped(most_C)
        below_CxV = jnp.maximum(layout.only_rows(capped(products_CxV)) - largest_C[:, None], NOTHING)
        below_target_C = capped(of_target_C) - largest_C
        # Of p - 1 at the target no digits are lost where p is near 1: it is what the others have. Made once, since the
        # sums of it that follow would each make it anew.
        is_other_CxV = jnp.arange(rows) != own_C[:, None]
        others_CxV = as_it_is_on_cpu(jnp.where(is_other_CxV, jnp.exp(below_CxV), 0))
        others_C, target_C = layout.sum_of_rows(others_CxV.sum(axis=1)), jnp.exp(below_target_C)
        sum_C = others_C + target_C
        scaled_C = layout.sum_of_rows(jnp.sum(others_CxV * below_CxV, axis=1)) + target_C * below_target_C
        square_C = layout.sum_of_rows(jnp.sum(others_CxV**2, axis=1)) + others_C**2
        stats = TokenStats(
            largest=largest_C,
            log_sum=largest_C + jnp.log(sum_C),
            confidence=1 / sum_C,
            # The first of the largest.
            is_right=(of_target_C == most_C) & ~layout.any_of_rows(jnp.any(is_before_CxV, axis=1)),
            entropy=jnp.log(sum_C) - scaled_C / sum_C,
            square=square_C / sum_C**2,
            counted=mask_C,
        )
        weight_C = mask_C / sum_C
        probability_V += matmul(weight_C, others_CxV, (0, 0))
        probability_V = probability_V.at[own_C].add(weight_C * target_C, mode="drop")
        of_targets_CxR = others_C[:, None] * layout.rows_at(directions_VxR, targets_C)
        along_CxR = layout.sum_of_rows(matmul(others_CxV, directions_VxR) - of_targets_CxR) * weight_C[:, None]
        return (probability_V, along_RxR + matmul(along_CxR, along_CxR, (0, 0))), stats

    zeros = jnp.zeros(rows), jnp.zeros(2 * directions_VxR.shape[1:])
    in_blocks = to_blocks(h_NxD, blocks), to_blocks(targets_N, blocks), to_blocks(mask_N, blocks)
    (probability_V, along_RxR), stats = lax.scan(add_block, zeros, in_blocks)
    return Seen(
        jax.tree.map(lambda values_BxC: from_blocks(values_BxC, tokens), stats),
        layout.sum_of_tokens(probability_V),
        layout.sum_of_tokens(along_RxR),
    )


_look = jax.jit(_look_in_blocks, static_argnums=(0, 1, 2))


def _log_ratios(probability_V: Float64[np.ndarray, "V"], frequencies: Float[AnyArray, "V"]) -> dict[str, float]:
    frequency_V = row_vector("frequencies", frequencies, probability_V.size)
    frequency_V = frequency_V / frequency_V.sum()
    seen = frequency_V > 0
    with np.errstate(divide="ignore"):  # a probability that is 0 in float32
        return by_band(np.log(probability_V[seen] / frequency_V[seen]), bands_of(frequency_V)[seen])


def _calibration_error(confidence_N: Float[AnyArray, "N"], is_right_N: Float[AnyArray, "N"]) -> float:
    bins_N = np.clip(np.ceil(confidence_N * BINS).astype(int) - 1, 0, BINS - 1)
    return float(np.abs(np.bincount(bins_N, weights=is_right_N - confidence_N)).sum() / bins_N.size)
