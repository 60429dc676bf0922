"""Paired comparison over seeds."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import stats


def interval(values: Sequence[float]) -> list[float] | None:
    """The 95% t interval of the mean, [low, high]; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return [mean - float(half), mean + float(half)]


def ratio(sums: Float[np.ndarray, "S"], counts: Int[np.ndarray, "S"]) -> dict[str, Any]:
    """The mean over all items of independent samples that hold several each, and its 95% t interval.

    The interval sees how the samples differ, whatever the correlation of the items within one. It is that of the
    linearised ratio (Cochran 1977, Sampling Techniques, 3rd ed., eq. 6.13), of `interval` where all counts are equal.

    Args:
        sums: of the items of each sample.
        counts: of the items of each sample; samples without an item of the kind are samples, too.
    """
    mean = float(np.sum(sums, dtype=np.float64) / np.sum(counts))
    if sums.size < 2:
        return {"mean": mean, "ci95": None}
    residuals = (np.asarray(sums, np.float64) - mean * counts) / np.mean(counts)
    half = float(stats.t.ppf(0.975, sums.size - 1) * np.std(residuals, ddof=1) / math.sqrt(sums.size))
    return {"mean": mean, "ci95": [mean - half, mean + half]}


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Mean, interval and the values themselves, one for each seed; of those that are defined, None for the others."""
    defined = [float(value) for value in values if not math.isnan(value)]
    per_seed = [None if math.isnan(value) else float(value) for value in values]
    return {"mean": float(np.mean(defined)), "ci95": interval(defined), "per_seed": per_seed}


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Values less baseline, seed by seed: what the seeds share (data, initial values) cancels."""
    return summarize([a - b for a, b in zip(values, baseline, strict=True)])
