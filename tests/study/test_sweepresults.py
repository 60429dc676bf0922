"""What the points of a sweep say together."""

import itertools
import json

import numpy as np
import pytest

from tied_lm.intervals import Difference, Estimate, HeldoutEstimate, summarize
from tied_lm.study.sweepreport import sentences, table_rows, write_sweep_page
from tied_lm.study.sweepresults import RATES as RATE_FIELDS
from tied_lm.study.sweepresults import PointResult, Results, own_best_rates, write_results

RATE, WIDTH = "optimizer.learning_rate", "model.features"


def point_of(index, settings, per_seed):
    """A point whose arms have these losses by seed; None is that of an arm that diverged."""
    base = per_seed["untied"]
    return PointResult(
        index=index,
        folder="",
        settings=settings,
        parameters=dict.fromkeys(per_seed, 10),
        diverged={arm: "no longer finite" for arm, values in per_seed.items() if values is None},
        eval_loss={
            arm: None if values is None else HeldoutEstimate(**vars(summarize(values)))
            for arm, values in per_seed.items()
        },
        differences={
            arm: None if values is None or base is None else Difference(**vars(summarize(np.subtract(values, base))))
            for arm, values in per_seed.items()
            if arm != "untied"
        },
    )


def results_from(points, arms, seeds, grid):
    rates = [field for field in RATE_FIELDS if field in grid]
    return Results(list(arms), "untied", seeds, grid, False, points, rates, own_best_rates(points, rates, "untied"))


def results_of(losses, rates, widths=(8,), diverged=()):
    """The results of a sweep over widths and rates, from losses[arm][width, rate, seed]."""
    points = []
    for w, width in enumerate(widths):
        for r, rate in enumerate(rates):
            per_seed = {arm: None if (arm, rate) in diverged else table[w, r].tolist() for arm, table in losses.items()}
            points.append(point_of(len(points), {WIDTH: width, RATE: rate}, per_seed))
    return results_from(points, losses, losses["untied"].shape[2], {WIDTH: list(widths), RATE: list(rates)})


def own_by_hand(losses_RxS):
    """The mean loss of each seed at the rates whose sums over two of five neighbours, without it, are lowest."""
    measured = [[] for _ in range(5)]
    for turn in range(5):
        choosing = [turn, (turn + 1) % 5]
        sums = [sum(row[s] for s in choosing) for row in losses_RxS.tolist()]
        for s in set(range(5)) - set(choosing):
            measured[s].append(losses_RxS[sums.index(min(sums)), s])
    return np.mean(measured, axis=1)


RATES = (0.01, 0.1, 1.0, 10.0)


def test_each_arm_at_its_own_best_rate_against_numpy():
    rng = np.random.default_rng(0)
    losses = {arm: rng.normal(4, 0.1, (2, 4, 5)) for arm in ("tied", "scaled", "untied")}
    losses["tied"][:, 2] -= 0.2
    losses["untied"][:, 1] -= 0.2
    for w, combination in enumerate(results_of(losses, RATES, (8, 16)).combinations):
        assert combination.settings == {WIDTH: (8, 16)[w]}
        assert combination.best_for_baseline == 4 * w + 1
        base_S = own_by_hand(losses["untied"][w])
        for arm in ("tied", "scaled"):
            own = combination.own[arm]
            own_S = own_by_hand(losses[arm][w])
            np.testing.assert_allclose(own.eval_loss.per_seed, own_S, rtol=1e-12)
            d_S = own_S - base_S
            np.testing.assert_allclose(own.difference.mean, d_S.mean(), rtol=1e-9)
            assert own.difference.ci95 is None  # fewer than 6 seeds describe
            assert own.rates == {RATE: RATES[int(np.argmin(losses[arm][w].mean(axis=1)))]}
        assert combination.own["tied"].rates == {RATE: 1.0}
        assert combination.own["untied"].difference is None


def test_a_shared_rate_is_compared_seed_by_seed():
    losses = {"tied": np.array([[[4.0, 5.0], [3.0, 3.5]]]), "untied": np.array([[[3.9, 4.7], [3.1, 3.1]]])}
    first, second = results_of(losses, (0.1, 1.0)).points
    assert first.differences["tied"].per_seed == pytest.approx([0.1, 0.3])
    assert second.differences["tied"].mean == pytest.approx(0.15)


def test_a_choice_on_the_same_seeds_would_be_too_good():
    # Both arms draw from one law at every rate, so in truth there is nothing to gain by choosing.
    rng = np.random.default_rng(1)
    own, naive = [], []
    for _ in range(400):
        losses_RxS = rng.normal(0, 1, (4, 3))
        (combination,) = results_of({"untied": losses_RxS[None]}, RATES).combinations
        own.append(combination.own["untied"].eval_loss.mean)
        naive.append(losses_RxS.mean(axis=1).min())
    assert abs(np.mean(own)) < 4 * np.std(own) / 20
    assert np.mean(naive) < -0.5


def test_a_best_rate_at_the_edge_is_told():
    losses = {arm: np.full((1, 3, 2), 4.0) for arm in ("tied", "untied")}
    losses["tied"][0, 2], losses["untied"][0, 1] = 3.0, 3.0
    results = results_of(losses, RATES[:3])
    assert results.combinations[0].own["tied"].at_edge == [RATE]
    assert results.combinations[0].own["untied"].at_edge == []
    text = " ".join(sentences(results))
    assert "tied at learning_rate=1 (at the edge of the grid in learning_rate: a better one may lie beyond)" in text
    assert "untied at learning_rate=0.1." in text
    rows = table_rows(results)
    assert [row[1] for row in rows] == ["learning_rate", "0.01", "0.1 *", "1", "own best (edge)"]


def test_a_diverged_arm_is_never_chosen_and_named(tmp_path):
    losses = {arm: np.array([[[4.0, 4.1], [3.0, 3.1], [2.0, 2.1]]]) for arm in ("tied", "untied")}
    results = results_of(losses, RATES[:3], diverged=[("tied", 1.0)])
    own = results.combinations[0].own
    assert (own["tied"].rates[RATE], own["untied"].rates[RATE]) == (0.1, 1.0)
    assert own["tied"].at_edge == []  # a higher rate was tried
    assert own["tied"].difference.per_seed == pytest.approx([1.0, 1.0])
    last = table_rows(results)[3]
    assert (last[3], last[4], last[5]) == ("-", "diverged", "2.0500")
    assert "Diverged in some seed, and count as an infinite loss" in sentences(results)[-1]
    assert "tied at features=8, learning_rate=1" in sentences(results)[-1]
    write_results(tmp_path, results)
    assert json.loads((tmp_path / "results.json").read_text())["points"][2]["eval_loss"]["tied"] is None
    write_sweep_page(tmp_path, results)


def test_an_arm_that_diverges_everywhere_has_no_best_rate(tmp_path):
    losses = {arm: np.full((1, 2, 2), 4.0) for arm in ("tied", "untied")}
    results = results_of(losses, RATES[:2], diverged=[("untied", 0.01), ("untied", 0.1)])
    (combination,) = results.combinations
    assert combination.own["untied"] is None
    assert combination.best_for_baseline is None
    assert combination.own["tied"].difference is None
    assert "untied diverged at every one" in " ".join(sentences(results))
    write_sweep_page(tmp_path, results)


def test_one_seed_has_no_interval_and_says_so(tmp_path):
    losses = {"tied": np.array([[[4.0], [3.0]]]), "untied": np.array([[[3.5], [3.6]]])}
    results = results_of(losses, RATES[:2])
    assert results.combinations[0].own["tied"].difference == Estimate(-0.5, None, (-0.5,))
    text = " ".join(sentences(results))
    assert "over 1 seed; no interval" in text
    assert "on the very seed that is compared" in text
    write_sweep_page(tmp_path, results)


@pytest.mark.parametrize(
    ("grid", "ticks"),
    [
        ({RATE: [0.01, 0.1, 1.0]}, ["0.01", "0.1", "1", "own best"]),
        ({WIDTH: [8, 16], RATE: [0.1, 1.0]}, ["8", "16"]),
        ({"model.body": ["none", "mlp"]}, ["none", "mlp"]),
        ({"model.scale_input": [False, True], WIDTH: [4, 400]}, ["4", "400"]),
    ],
)
def test_the_page_is_one_table_and_one_figure_in_one_file(tmp_path, grid, ticks):
    rng = np.random.default_rng(0)
    arms = ("tied", "<b>", "untied")
    points = [
        point_of(i, dict(zip(grid, values, strict=True)), {arm: rng.normal(4, 0.1, 3).tolist() for arm in arms})
        for i, values in enumerate(itertools.product(*grid.values()))
    ]
    write_sweep_page(tmp_path, results_from(points, arms, 3, grid))
    page = (tmp_path / "sweep.html").read_text()
    assert (page.count("<table"), page.count("<svg")) == (1, 1)
    assert "<b>" not in page
    assert "src=" not in page
    assert all(f"<!-- {tick} -->" in page for tick in ticks)
