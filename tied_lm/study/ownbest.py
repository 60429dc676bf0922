"""Arms at the rates that are best for each of them, compared without the luck of the choice."""

import itertools
import math

import numpy as np
from jaxtyping import Bool, Float

from tied_lm.intervals import Difference, Ends, outcome

LEVEL = 0.05
MOST_SWAPS = 2048
TRIES = 32  # places on each side of the mean at which the interval is looked for


def _choosing(seeds: int) -> Bool[np.ndarray, "S S"]:
    """Which seeds choose in each turn: half of them, going round in a circle."""
    return (np.arange(seeds)[:, None] - np.arange(seeds)) % seeds < seeds // 2


def at_own_best(
    losses: Float[np.ndarray, "... R S"], measured: Float[np.ndarray, "... R S"] | None = None
) -> Float[np.ndarray, "... S"]:
    """The loss of each seed at rates that are the best of others.

    Half of the seeds choose the rate with the lowest mean loss, and the others are measured at it; this goes round, so
    that each is measured as often, and its mean is taken. No seed helps to choose a rate at which it is measured, so
    the mean over seeds does not flatter. One seed alone chooses for itself.

    Args:
        losses: of each rate and seed.
        measured: what is measured at the rates, if not the loss.
    """
    seeds, measured = losses.shape[-1], losses if measured is None else measured
    if seeds == 1:
        return np.take_along_axis(measured, np.argmin(losses, axis=-2)[..., None, :], axis=-2)[..., 0, :]
    chooses_SxT = _choosing(seeds)
    best_T = np.argmin(losses @ chooses_SxT, axis=-2)
    values_TxS = np.take_along_axis(measured, best_T[..., None], axis=-2)
    measures_TxS = ~chooses_SxT.T
    return (values_TxS * measures_TxS).sum(axis=-2) / measures_TxS.sum(axis=0)


def _swaps(seeds: int) -> Bool[np.ndarray, "P S"]:
    """Ways to swap two arms within seeds, the first of which swaps none; all of them up to a swap of all seeds, which
    changes only a sign, or a sample where these are too many."""
    if 2 ** (seeds - 1) <= MOST_SWAPS:
        return np.array([(False, *rest) for rest in itertools.product((False, True), repeat=seeds - 1)])
    swaps = np.random.default_rng(0).integers(0, 2, (MOST_SWAPS, seeds)).astype(bool)
    swaps[0] = False
    return swaps


def p_value(arm: Float[np.ndarray, "R S"], baseline: Float[np.ndarray, "R S"], swaps: Bool[np.ndarray, "P S"]) -> float:
    """How rare a difference of the arms at their own best rates is, if it makes no difference which arm is which.

    The arms are swapped within seeds, at all rates together, and the rates are chosen anew each time: a permutation
    test (Ernst 2004, Statistical Science 19), so that a choice among many rates is part of what is counted.
    """
    swaps_Px1xS = swaps[:, None, :]
    first, second = np.where(swaps_Px1xS, baseline, arm), np.where(swaps_Px1xS, arm, baseline)
    differences_P = np.abs((at_own_best(first) - at_own_best(second)).mean(axis=-1))
    rounding = 1e-12 * max(np.abs(arm).max(), np.abs(baseline).max())
    return float(np.mean(differences_P >= differences_P[0] - rounding))


def fewest_seeds(intervals: int) -> int | None:
    """The seeds without which no difference is rare enough, since whatever is seen is one of the ways to swap.

    Args:
        intervals: how many hold at once; None if no number of seeds is enough for so many.
    """
    if LEVEL / intervals < 1 / MOST_SWAPS:
        return None
    return 1 + math.ceil(math.log2(intervals / LEVEL))


def interval(arm: Float[np.ndarray, "R S"], baseline: Float[np.ndarray, "R S"], intervals: int = 1) -> Ends | None:
    """The 95% interval of the difference of the mean losses at the arms' own best rates.

    It holds the differences d of which it cannot be said that the arm less d is another arm than the baseline (see
    `p_value`).

    Args:
        intervals: how many hold at once with 95% (Bonferroni).

    Returns:
        None for fewer seeds than `fewest_seeds`.
    """
    seeds, fewest = arm.shape[1], fewest_seeds(intervals)
    if fewest is None or seeds < fewest:
        return None
    swaps = _swaps(seeds)
    mean = float((at_own_best(arm) - at_own_best(baseline)).mean())

    def is_possible(difference: float) -> bool:
        return p_value(arm - difference, baseline, swaps) > LEVEL / intervals

    def bound(sign: float) -> float:
        """The farthest possible difference on one side; there the mean is possible, and what is far enough is not."""
        reach = float(np.abs((arm - baseline) - mean).max()) or 1e-12 * max(abs(mean), 1.0)
        while is_possible(mean + sign * reach):
            reach *= 2
        # What is possible need not be one piece, so it is looked for from outside.
        tried = np.linspace(0.0, reach, TRIES + 1)
        inside = next(i for i in range(TRIES, -1, -1) if i == 0 or is_possible(mean + sign * tried[i]))
        low, high = tried[inside], tried[inside + 1]
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (middle, high) if is_possible(mean + sign * middle) else (low, middle)
        return mean + sign * float(high)

    return bound(-1.0), bound(1.0)


def difference(
    arm: Float[np.ndarray, "R S"], baseline: Float[np.ndarray, "R S"], margin: float, intervals: int
) -> Difference:
    """The loss of an arm less that of the baseline, each at its own best rates. Few seeds describe, without an outcome.

    Args:
        arm, baseline: loss of each rate and seed, infinite where a rate diverged. There is no interval where one of
            them is measured at a rate at which the other diverged: they cannot be swapped there.
        margin: the difference that matters.
        intervals: how many hold at once.
    """
    trained = [np.isfinite(losses).all(axis=1) for losses in (arm, baseline)]
    by_seed_S = at_own_best(arm[trained[0]]) - at_own_best(baseline[trained[1]])
    both = trained[0] & trained[1]
    alone = together = None
    if both.any() and np.array_equal(by_seed_S, at_own_best(arm[both]) - at_own_best(baseline[both])):
        alone = interval(arm[both], baseline[both])
        together = interval(arm[both], baseline[both], intervals) if intervals > 1 else alone
    said = None if together is None else outcome(*together, margin)
    return Difference(
        float(by_seed_S.mean()), alone, tuple(by_seed_S.tolist()), ci95_simultaneous=together, outcome=said
    )
