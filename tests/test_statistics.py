"""Intervals over seeds against values worked out by hand."""

import numpy as np
import pytest

from tied_lm.statistics import interval, paired_difference, ratio, summarize


def test_interval_of_three_values():
    # Mean 2, standard deviation 1, t(0.975, 2) = 4.30265: 2 -+ 4.30265 / sqrt(3).
    assert interval([1.0, 2.0, 3.0]) == pytest.approx([-0.484138, 4.484138], abs=1e-5)


def test_interval_of_five_values():
    # Mean 6, variance 40 / 4 = 10, t(0.975, 4) = 2.776445: half = 2.776445 * sqrt(10 / 5).
    assert interval([2.0, 4.0, 6.0, 8.0, 10.0]) == pytest.approx([6 - 3.926486, 6 + 3.926486], abs=1e-5)


def test_interval_of_two_values():
    # t(0.975, 1) = 12.7062, standard deviation sqrt(1 / 2).
    assert interval([0.0, 1.0]) == pytest.approx([0.5 - 6.3531, 0.5 + 6.3531], abs=1e-4)


@pytest.mark.parametrize("values", [[], [1.5]])
def test_one_seed_has_no_interval(values):
    assert interval(values) is None


def test_summary_of_one_seed():
    assert summarize([1.5]) == {"mean": 1.5, "ci95": None, "per_seed": [1.5]}


def test_difference_is_paired_by_seed():
    # The seeds differ by far more than the arms do; in pairs only the difference of 0.1, 0.2, 0.3 is left.
    difference = paired_difference([10.1, 20.2, 30.3], [10.0, 20.0, 30.0])
    assert difference["per_seed"] == pytest.approx([0.1, 0.2, 0.3])
    assert difference["mean"] == pytest.approx(0.2)
    half = 4.302653 * 0.1 / 3**0.5
    assert difference["ci95"] == pytest.approx([0.2 - half, 0.2 + half], abs=1e-6)


def test_arms_with_other_numbers_of_seeds_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_difference([1.0, 2.0], [1.0])


def test_the_ratio_of_equal_samples_is_their_mean():
    sums = np.array([2.0, 4.0, 9.0])
    found = ratio(sums, np.array([2, 2, 2]))
    assert found["mean"] == pytest.approx(2.5)
    assert found["ci95"] == pytest.approx(interval((sums / 2).tolist()))


def test_the_interval_of_a_ratio_covers_the_truth():
    # Items of one sample are alike, samples differ in size; an interval over items would be far too narrow.
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(500):
        counts = rng.integers(0, 20, 40)
        found = ratio(counts * rng.normal(1.0, 1.0, 40), counts)
        low, high = found["ci95"]
        covered += low <= 1.0 <= high
    assert 0.92 < covered / 500 < 0.98


def test_one_sample_has_no_interval():
    assert ratio(np.array([3.0]), np.array([2])) == {"mean": 1.5, "ci95": None}
