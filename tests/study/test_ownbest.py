"""Arms at their own best rates: simulated false alarms, power, and coverage."""

import numpy as np
import pytest

from tied_lm.study import ownbest
from tied_lm.study.ownbest import LEVEL, at_own_best, difference, fewest_seeds, interval, p_value

MARGIN = 0.01


def draw(rng, seeds, rates, effect):
    """Two arms of one law: losses that differ by `effect` seed-SDs from rate to rate, and a part that seeds share."""
    means = effect * np.abs(np.arange(rates) - rates // 2)[:, None]
    return means + rng.normal(size=(2, rates, seeds)) + rng.normal(size=(1, 1, seeds))


@pytest.mark.parametrize("seeds", [6, 7, 8, 9, 10])
def test_arms_of_one_law_are_seldom_told_apart(seeds):
    rng = np.random.default_rng(seeds)
    swaps = ownbest._swaps(seeds)
    count = 800 if seeds < 9 else 400
    alarms = 0
    for i in range(count):
        a, b = draw(rng, seeds, rates=2 + i % 7, effect=(0, 0.5, 1, 3)[i // 7 % 4])
        alarms += p_value(a, b, swaps) <= LEVEL
    assert 0.01 < alarms / count <= 0.065


def test_an_arm_that_is_noisier_is_not_told_apart_by_that():
    rng = np.random.default_rng(0)
    swaps = ownbest._swaps(8)
    alarms = [p_value(*(draw(rng, 8, 4, 0) * [[[1.0]], [[3.0]]]), swaps) <= LEVEL for _ in range(800)]
    assert np.mean(alarms) <= 0.065


def test_a_difference_is_seen_and_the_interval_covers_it():
    rng = np.random.default_rng(0)
    seen = covered = 0
    for _ in range(200):
        a, b = draw(rng, 6, 4, 3)
        low, high = interval(a - 4, b)
        seen += high < 0
        covered += low <= -4 <= high
    assert seen > 150
    assert covered >= 187  # 95 %, less 1.5 times its error


@pytest.mark.parametrize(("arms", "seeds"), [(2, 7), (4, 8), (4, 10), (7, 9)])
def test_several_arms_of_one_law_are_seldom_told_apart_from_their_baseline(arms, seeds):
    """Each arm and the baseline choose among four rates; more arms need more seeds, and hold at once."""
    rng = np.random.default_rng(arms + seeds)
    swaps = ownbest._swaps(seeds)
    alone = together = 0
    for i in range(300):
        means = (0, 0.5, 1, 3)[i % 4] * np.abs(np.arange(4) - 2)[:, None]
        losses = means + rng.normal(size=(arms + 1, 4, seeds)) + rng.normal(size=(1, 1, seeds))
        p = min(p_value(arm, losses[0], swaps) for arm in losses[1:])
        alone += p <= LEVEL
        together += p <= LEVEL / arms
    assert together / 300 <= 0.065
    assert alone / 300 > 0.065  # of unadjusted ones


@pytest.mark.slow
def test_the_intervals_of_several_arms_cover_their_differences_at_once():
    rng, true = np.random.default_rng(0), (-4.0, 0.0, 2.0, 0.5)
    covered = 0
    for _ in range(150):
        losses = rng.normal(size=(5, 3, 8)) + rng.normal(size=(1, 1, 8)) + 3 * np.arange(3)[:, None]
        found = [interval(arm + d, losses[0], 4) for arm, d in zip(losses[1:], true, strict=True)]
        covered += all(low <= d <= high for (low, high), d in zip(found, true, strict=True))
    assert covered >= 138  # 95 %, less 1.5 times its error


def test_more_arms_need_more_seeds():
    assert [fewest_seeds(arms) for arms in (1, 2, 4, 102, 103)] == [6, 7, 8, 12, None]
    a, b = draw(np.random.default_rng(0), 7, 3, 1)
    assert interval(a, b, 2)
    assert interval(a, b, 4) is None
    found = difference(a - 100, b, MARGIN, 4)
    assert (found.ci95 is None, found.ci95_simultaneous, found.outcome) == (False, None, None)
    two = difference(a - 100, b, MARGIN, 2)
    assert two.outcome == "better"
    assert two.ci95_simultaneous[0] < two.ci95[0] < two.ci95[1] < two.ci95_simultaneous[1]


def test_the_interval_and_the_test_say_the_same():
    rng = np.random.default_rng(1)
    for _ in range(40):
        a, b = draw(rng, 6, 3, 0.5)
        low, high = interval(a - 1, b)
        assert (low <= 0 <= high) == (p_value(a - 1, b, ownbest._swaps(6)) > LEVEL)


@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
def test_few_seeds_describe(seeds):
    a, b = draw(np.random.default_rng(0), seeds, 3, 1)
    found = difference(a - 100, b, MARGIN, 1)
    assert found.ci95 is None
    assert found.mean == pytest.approx((at_own_best(a - 100) - at_own_best(b)).mean())


def test_what_was_measured_where_the_other_arm_diverged_has_no_interval():
    a, b = draw(np.random.default_rng(0), 6, 3, 1)
    a[2], b[2] = np.inf, 50.0  # never chosen
    assert difference(a, b, MARGIN, 1).ci95 == pytest.approx(interval(a[:2], b[:2]))
    b[2] = -50.0
    assert difference(a, b, MARGIN, 1).ci95 is None


def test_equal_arms_have_an_interval_of_nothing():
    a, _ = draw(np.random.default_rng(0), 6, 3, 1)
    low, high = interval(a, a)
    assert low == pytest.approx(0, abs=1e-9)
    assert high == pytest.approx(0, abs=1e-9)
