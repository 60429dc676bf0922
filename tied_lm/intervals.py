"""Means, and the intervals that hold what was sampled."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy  # whose parts are loaded when they are used
from jaxtyping import Float, Int

LARGEST_DIGITS = 8  # after the point, before figures are written with an exponent
MOST_SEEDS = 1000  # that are thought of when asking how many would be enough

Ends = tuple[float, float]  # of an interval, low and high


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its 95% interval over them (None where there is none), and the values, None if undefined."""

    mean: float
    ci95: Ends | None
    per_seed: tuple[float | None, ...]

    @property
    def shown(self) -> Ends | None:
        """The interval that people are shown."""
        return self.ci95


@dataclasses.dataclass(frozen=True)
class HeldoutEstimate(Estimate):
    """A mean over seeds and held-out tokens: `ci95` is over both, `ci95_heldout` over the tokens alone. The second is
    shown where one seed gives no other."""

    ci95_heldout: Ends | None = None

    @property
    def shown(self) -> Ends | None:
        return self.ci95 or self.ci95_heldout


@dataclasses.dataclass(frozen=True)
class Difference(HeldoutEstimate):
    """A mean of differences to a baseline. `ci95_simultaneous` holds together with those of other differences, and
    `outcome` goes by it; both are None with one seed. `seeds_to_decide` make it narrower than the margin, so that it
    cannot hold both 0 and the margin; None where no number of seeds does."""

    ci95_simultaneous: Ends | None = None
    outcome: str | None = None  # see `outcome`
    seeds_to_decide: int | None = None

    @property
    def shown(self) -> Ends | None:
        return self.ci95_simultaneous or self.ci95_heldout


def with_interval(estimate: Estimate | None, sign: str = "", digits: int = 4, unit: str = "") -> str:
    """`mean [low, high]`, or the mean alone where there is no interval, or `-` where nothing is defined.

    Figures get more digits where the largest of them would show fewer than two that count.

    Args:
        digits: after the point, at least.
        unit: written after all of it.
    """
    if estimate is None:
        return "-"
    figures = [estimate.mean, *(estimate.shown or ())]
    largest = max(map(abs, figures))
    if largest and math.isfinite(largest):
        digits = max(digits, 1 - math.floor(math.log10(largest)))
    # z: what is rounded to 0 has no sign.
    form = f"{sign}z.{digits}f" if digits <= LARGEST_DIGITS else f"{sign}.1e"
    mean, *shown = [f"{figure:{form}}" for figure in figures]
    return mean + (f" [{', '.join(shown)}]" if shown else "") + unit


def interval(values: Sequence[float]) -> Ends | None:
    """The 95% t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - float(half), mean + float(half)


Scale = tuple[Callable[[Any], Any], Callable[[Any], Any]]
SHARE: Scale = (lambda share: scipy.special.logit(share), lambda logit: scipy.special.expit(logit))
COSINE: Scale = (np.arctanh, np.tanh)  # Fisher's z
RATIO: Scale = (np.log, np.exp)


def summarize(values: Sequence[float] | Float[np.ndarray, "S"], scale: Scale | None = None) -> Estimate:
    """Mean, 95% t interval, and the value of each seed; of the values that are defined, None for the others.

    Args:
        scale: a function and its inverse. Mean and interval are taken on that scale and brought back, so that they
            stay among the possible values. With a value at a bound, where the scale ends, there is no interval, and
            the mean is that of the values.
    """
    defined = np.array([value for value in values if not math.isnan(value)])
    per_seed = tuple(None if math.isnan(value) else float(value) for value in values)
    if scale is None:
        return Estimate(float(np.mean(defined)), interval(defined.tolist()), per_seed)
    forward, back = scale
    with np.errstate(divide="ignore"):
        scaled = forward(defined)
    if not np.isfinite(scaled).all():
        return Estimate(float(np.mean(defined)), None, per_seed)
    ends = interval(scaled.tolist())
    return Estimate(float(back(np.mean(scaled))), ends and (float(back(ends[0])), float(back(ends[1]))), per_seed)


@dataclasses.dataclass(frozen=True)
class Crossed:
    """A mean over seeds and over clusters of held-out tokens, where every seed scores the same ones.

    With seeds s and clusters j as crossed random effects, value = mean + seed_s + cluster_j + rest_sj, the variance of
    the mean is that of the seeds, V_s / S, and that of the clusters with the rest, (V_j + V_sj / S) / J. The second is
    the variance of the clusters' means over J; the first that of the seeds' means over S less the mean square of the
    rest over S J, and at least 0. The half width is sqrt(t_(S-1)^2 first + t_(J-1)^2 second): each variance with the
    t of its own degrees of freedom (Howe 1974, J. Am. Stat. Assoc. 69, for two components). Clusters of unequal size
    enter by the residuals of the linearised ratio (Cochran 1977, Sampling Techniques, 3rd ed., eq. 6.13).
    """

    mean: float
    per_seed: tuple[float | None, ...]
    clusters: int
    seed_variance: float  # V_s, of one seed
    cluster_variance: float  # (V_j + V_sj / S) / J, of the mean

    @classmethod
    def of(cls, sums_SxJ: Float[np.ndarray, "S J"], counts_J: Int[np.ndarray, "J"]) -> "Crossed":
        """The mean over all tokens.

        Args:
            sums_SxJ: over the tokens of each cluster.
            counts_J: tokens of each cluster; clusters without one of the kind are clusters, too.
        """
        seeds, clusters = sums_SxJ.shape
        total = np.sum(counts_J)
        per_seed = sums_SxJ.sum(axis=1) / total
        mean = float(per_seed.mean())
        residuals_SxJ = (sums_SxJ - mean * counts_J) / (total / clusters)
        of_seed_S, of_cluster_J = residuals_SxJ.mean(axis=1), residuals_SxJ.mean(axis=0)
        seed_variance = 0.0
        if seeds > 1:
            rest_SxJ = residuals_SxJ - of_seed_S[:, None] - of_cluster_J
            rest = np.sum(rest_SxJ**2) / ((seeds - 1) * max(clusters - 1, 1))
            seed_variance = max(float(np.var(of_seed_S, ddof=1) - rest / clusters), 0.0)
        cluster_variance = float(np.var(of_cluster_J, ddof=1)) / clusters if clusters > 1 else math.nan
        return cls(mean, tuple(per_seed.tolist()), clusters, seed_variance, cluster_variance)

    @classmethod
    def of_estimate(cls, estimate: HeldoutEstimate, clusters: int) -> "Crossed":
        """What an estimate was made of, as far as its two intervals tell; they were cut nowhere."""

        def half(ends: Ends | None) -> float:
            return math.nan if ends is None else (ends[1] - ends[0]) / 2

        heldout, seeds, seed_variance = half(estimate.ci95_heldout), len(estimate.per_seed), 0.0
        if seeds > 1:
            of_seeds = max(half(estimate.ci95) ** 2 - heldout**2, 0.0)
            seed_variance = seeds * of_seeds / scipy.stats.t.ppf(0.975, seeds - 1) ** 2
        cluster_variance = (heldout / scipy.stats.t.ppf(0.975, clusters - 1)) ** 2 if clusters > 1 else math.nan
        return cls(estimate.mean, estimate.per_seed, clusters, float(seed_variance), float(cluster_variance))

    def half_width(self, intervals: int = 1, seeds: int | None = None) -> float:
        """Of the 95% interval; NaN with one seed or one cluster.

        Args:
            intervals: how many hold at once with 95% (Bonferroni).
            seeds: as if there were so many.
        """
        seeds, tail = seeds or len(self.per_seed), 0.025 / intervals
        of_seeds = scipy.stats.t.isf(tail, seeds - 1) ** 2 * self.seed_variance / seeds if seeds > 1 else math.nan
        return math.sqrt(of_seeds + self._of_clusters(tail))

    def _of_clusters(self, tail: float) -> float:
        return (
            float(scipy.stats.t.isf(tail, self.clusters - 1) ** 2 * self.cluster_variance)
            if self.clusters > 1
            else math.nan
        )

    def heldout_half_width(self) -> float:
        """Of the 95% interval over the clusters alone: it says nothing of other seeds. NaN with one cluster."""
        return math.sqrt(self._of_clusters(0.025))

    def seeds_for(self, half_width: float, intervals: int = 1) -> int | None:
        """The number of seeds that makes the interval as narrow as this; None if no number does."""
        if not self._of_clusters(0.025 / intervals) < half_width**2:
            return None
        enough = (seeds for seeds in range(2, MOST_SEEDS) if self.half_width(intervals, seeds) <= half_width)
        return next(enough, None)

    def ends(self, half: float, lowest: float = -math.inf) -> Ends | None:
        """The mean less and plus a half width, cut at the lowest possible value; None if it is NaN."""
        return None if math.isnan(half) else (max(self.mean - half, lowest), self.mean + half)

    def estimate(self, lowest: float = -math.inf) -> HeldoutEstimate:
        """The mean with its intervals, cut at the lowest possible value."""
        both, heldout = self.ends(self.half_width(), lowest), self.ends(self.heldout_half_width(), lowest)
        return HeldoutEstimate(self.mean, both, self.per_seed, heldout)

    def difference(self, margin: float, intervals: int) -> Difference:
        """The mean as a difference to a baseline.

        Args:
            margin: the difference that matters.
            intervals: how many hold at once.
        """
        ends = self.ends(self.half_width(intervals))
        seeds = self.seeds_for(margin / 2, intervals) if len(self.per_seed) > 1 else None
        said = None if ends is None else outcome(*ends, margin)
        return Difference(**vars(self.estimate()), ci95_simultaneous=ends, outcome=said, seeds_to_decide=seeds)


def outcome(low: float, high: float, margin: float) -> str:
    """What an interval of a difference of losses says: better | worse | differs | equal | undecided.

    `differs` is a difference that may be smaller than the margin, `equal` one that is.
    """
    if high < -margin:
        return "better"
    if low > margin:
        return "worse"
    if -margin < low and high < margin:
        return "equal"
    return "undecided" if low <= 0 <= high else "differs"
