"""A published claim as a study: settings, one function that measures, and tests of its sign."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float
from scipy import stats

from tied_lm.intervals import Ends, Estimate, HeldoutEstimate, interval
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting

LEVEL = 0.05
# One value for each seed; of a loss with what the held-out tokens add; or what is told of values on a scale of theirs.
Value = Sequence[float] | Float[np.ndarray, "S"] | HeldoutEstimate | Estimate


@dataclasses.dataclass(frozen=True)
class Expectation:
    """One statistic and what the claim says of it: beyond `margin`, on the side of `sign`."""

    key: str  # in what `measure` returns
    words: str  # what the statistic is
    sign: int  # 1: the claim says above the margin; -1: below it
    margin: float = 0.0
    trial: str = ""  # what an earlier trial saw, with other seeds


@dataclasses.dataclass(frozen=True)
class Study:
    """Data and one function."""

    name: str
    claims: str  # their numbers, as in the list of claims that the studies were made from
    claim: str
    source: str
    settings: Mapping[str, Setting]
    tests: tuple[Expectation, ...]
    measure: Callable[[Results], dict[str, Value]]  # of the tests, and of what is told beside them
    minutes: float  # at the small scale, on 2 cores
    note: str = ""  # what the setting leaves open, what was tuned


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A test with its result."""

    words: str
    sign: int
    margin: float
    trial: str
    mean: float | None  # None where nothing could be measured; then `reason` says why
    ci95: Ends | None
    per_seed: tuple[float | None, ...]  # None where it is undefined
    p: float  # two-sided, of the mean at the margin
    reason: str = ""

    def verdict(self, p: float | None = None) -> str:
        """`holds here`, `does not hold here` or `cannot be told here`, with what could have been seen.

        Args:
            p: adjusted for other tests, if it is.
        """
        if self.mean is None or self.ci95 is None:
            return f"cannot be told here: {self.reason or 'there is no interval'}"
        if (self.p if p is None else p) < LEVEL:
            return "holds here" if self.sign * (self.mean - self.margin) > 0 else "does not hold here"
        half = (self.ci95[1] - self.ci95[0]) / 2
        return f"cannot be told here (alone, {half:.2g} from {self.margin:g} would have been seen)"


def judge(test: Expectation, value: Value) -> Outcome:
    """The mean over seeds against the margin, by a t test; of a loss over seeds and held-out tokens."""
    if isinstance(value, Estimate):  # of a loss; what is on a scale of its own is not tested
        per_seed, mean, ends = value.per_seed, value.mean, value.ci95
    else:
        defined = [float(one) for one in value if math.isfinite(one)]
        per_seed = tuple(float(one) if math.isfinite(one) else None for one in value)
        mean, ends = float(np.mean(value)), interval(defined) if len(defined) == len(value) else None
    if ends is None or not math.isfinite(mean):
        reason = "it is undefined for some seed"
        return Outcome(test.words, test.sign, test.margin, test.trial, None, None, per_seed, 1.0, reason)
    degrees = len(per_seed) - 1
    error = (ends[1] - ends[0]) / 2 / float(stats.t.ppf(0.975, degrees))
    distance = abs(mean - test.margin)
    p = float(2 * stats.t.sf(distance / error, degrees)) if error else float(distance == 0)
    return Outcome(test.words, test.sign, test.margin, test.trial, mean, ends, per_seed, p)


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for their number (Holm 1979, Scandinavian Journal of Statistics 6)."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted
