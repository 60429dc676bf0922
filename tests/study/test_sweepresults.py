"""What the points of a sweep say together."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tests.study.summaries import summary
from tests.study.test_report import colors_by_arm
from tied_lm import TiedEmbedding
from tied_lm.intervals import COSINE, SHARE, Crossed, Difference, HeldoutEstimate, outcome, summarize
from tied_lm.study.heldout import ClusterCount
from tied_lm.study.ownbest import interval
from tied_lm.study.summary import Split
from tied_lm.study.sweepreport import caveats, sentences, table_rows, told_sweep, write_sweep_page
from tied_lm.study.sweepresults import RATES as RATE_FIELDS
from tied_lm.study.sweepresults import PointResult, Results, own_best_rates, write_results

RATE, WIDTH = "optimizer.learning_rate", "model.features"
MARGIN = 0.01


def difference_of(per_seed):
    found = summarize(per_seed)
    said = found.ci95 and outcome(*found.ci95, MARGIN)
    return Difference(**vars(found), ci95_simultaneous=found.ci95, outcome=said, seeds_to_decide=40)


def point_of(index, settings, per_seed):
    """A point whose arms have these losses by seed; None is that of an arm that diverged."""
    base = per_seed["untied"]
    return PointResult(
        index=index,
        folder="here",
        settings=settings,
        parameters=dict.fromkeys(per_seed, 10),
        diverged={arm: "no longer finite" for arm, values in per_seed.items() if values is None},
        eval_loss={
            arm: None if values is None else HeldoutEstimate(**vars(summarize(values)))
            for arm, values in per_seed.items()
        },
        differences={
            arm: None if values is None or base is None else difference_of(np.subtract(values, base))
            for arm, values in per_seed.items()
            if arm != "untied"
        },
        caveats={arm: () for arm, values in per_seed.items() if values is not None},
        splits={"tied": Split(summarize([0.2, 0.25, 0.3], SHARE), summarize([-0.1, 0.0, 0.1], COSINE))},
    )


def results_from(points, arms, seeds, grid):
    rates = [field for field in RATE_FIELDS if field in grid]
    return Results(
        arms=list(arms),
        baseline="untied",
        seeds=seeds,
        margin=MARGIN,
        looks=(seeds,),
        grid=grid,
        matched=False,
        points=points,
        rates=rates,
        combinations=own_best_rates(points, rates, "untied", MARGIN),
        versions={"jax": "1.2.3"},
    )


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


@pytest.fixture
def crossed_sweep():
    """Summaries of three points with two arms, and what they were made of: differences of seeds and clusters."""
    rng, summaries, made = np.random.default_rng(0), [], {}
    for index, (mean, spread) in enumerate([(0.0, 0.001), (0.03, 0.001), (0.0, 0.03)]):
        values = {
            arm: mean * sign + spread * rng.normal(size=(5, 1)) + 0.002 * rng.normal(size=(5, 24))
            for arm, sign in (("tied", 1), ("wide", -1))
        }
        made |= {(index, arm): Crossed.of(one, np.ones(24, int)) for arm, one in values.items()}
        differences = {arm: made[index, arm].difference(MARGIN, 2) for arm in values}
        one = summary((0.0, 1.0))
        arms = one.arms | {"wide": one.arms["tied"]}
        clusters = ClusterCount("sequence", 24)
        summaries.append(dataclasses.replace(one, arms=arms, differences=differences, clusters=clusters))
    return summaries, made


class Planned:
    """Enough of a point: its number of parameters is that of its arms."""

    def __init__(self, index, arms):
        self.index, self.place, self.settings = index, Path(f"{index}"), {WIDTH: index}
        trainer = SimpleNamespace(model=TiedEmbedding(5, 2))
        self.plan = SimpleNamespace(arms=dict.fromkeys(arms, SimpleNamespace(trainer=trainer)))


@pytest.mark.untyped
def test_differences_of_all_points_hold_at_once_and_speak_against_the_margin(crossed_sweep):
    summaries, made = crossed_sweep
    points = [PointResult.of(Planned(i, one.arms), one, len(made)) for i, one in enumerate(summaries)]
    for (index, arm), crossed in made.items():
        found = points[index].differences[arm]
        t = stats.t.ppf(1 - 0.025 / 6, [4, 23])  # Bonferroni's, of six intervals
        half = np.sqrt(t[0] ** 2 * crossed.seed_variance / 5 + t[1] ** 2 * crossed.cluster_variance)
        assert found.ci95_simultaneous == pytest.approx((crossed.mean - half, crossed.mean + half), rel=1e-9)
        assert found.ci95 == summaries[index].differences[arm].ci95
    results = results_from(points, points[0].eval_loss, 5, {WIDTH: [0, 1, 2]})
    assert [row[3] for row in table_rows(results)[1:]] == ["equal"] * 2 + ["worse", "better"] + ["undecided"] * 2
    text = " ".join(sentences(results))
    assert "the 95% interval over 5 seeds and held-out text" in text
    assert "all 6 hold at once" in text
    assert "better or worse by more than 0.01 nats (compare.margin)" in text
    seeds = max(made[2, arm].seeds_for(MARGIN / 2, 6) for arm in ("tied", "wide"))
    assert f"2 undecided: about {seeds} seeds (--config.compare.seeds={seeds}) would decide them." in text


def test_caveats_and_looks_are_told_with_their_points(tmp_path):
    losses = {arm: np.full((1, 2, 2), 4.0) for arm in ("tied", "untied")}
    results = results_of(losses, RATES[:2])
    first = dataclasses.replace(results.points[0], caveats={"untied": ("It rises.",)})
    results = dataclasses.replace(results, points=[first, *results.points[1:]], looks=(1, 2))
    assert [row[4] for row in table_rows(results)[1:3]] == ["equal !", "equal"]
    assert sentences(results)[-1] == "! marks arms of which there is more to know:"
    assert caveats(results) == ["features=8, learning_rate=0.01: It rises."]
    assert "looked at once, with 1:" in " ".join(sentences(results))
    many = dataclasses.replace(first, caveats={"tied": ("It rises.",) * 9, "untied": ("It rises.",) * 5})
    told = told_sweep(dataclasses.replace(results, points=[many, *results.points[1:]]))
    assert told.endswith("It rises.\n... and 6 more, in sweep.html")
    write_sweep_page(tmp_path, results)
    assert "<li>features=8, learning_rate=0.01: It rises.</li>" in (tmp_path / "sweep.html").read_text()


def test_own_best_rates_of_all_arms_and_combinations_hold_at_once():
    rng = np.random.default_rng(0)
    losses = {arm: rng.normal(4, 0.001, (2, 4, 8)) for arm in ("tied", "scaled", "untied")}
    losses["tied"] -= 1.0
    results = results_of(losses, RATES, (8, 16))
    for w, combination in enumerate(results.combinations):
        found = combination.own["tied"].difference
        expected = interval(losses["tied"][w], losses["untied"][w], 4)
        assert (found.ci95_simultaneous, found.outcome) == (expected, "better")
        assert combination.own["scaled"].difference.outcome == "equal"
    assert "choose anew; all 4 hold at once." in " ".join(sentences(results))
    few = results_of({arm: table[..., :7] for arm, table in losses.items()}, RATES, (8, 16))
    assert few.combinations[0].own["tied"].difference.outcome is None
    assert "with fewer than 8 seeds they describe, and tell no arms apart" in " ".join(sentences(few))


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
    assert last[3:7] == ["-", "-", "diverged", "2.0500"]
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
    assert results.combinations[0].own["tied"].difference == Difference(-0.5, None, (-0.5,))
    text = " ".join(sentences(results))
    assert "over the held-out text alone: it says nothing of other seeds" in text
    assert "Outcome" not in text
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
def test_the_page_is_one_table_and_three_pictures_in_one_file(tmp_path, grid, ticks):
    rng = np.random.default_rng(0)
    arms = ("tied", "<b>", "untied")
    points = [
        point_of(i, dict(zip(grid, values, strict=True)), {arm: rng.normal(4, 0.1, 3).tolist() for arm in arms})
        for i, values in enumerate(itertools.product(*grid.values()))
    ]
    write_sweep_page(tmp_path, results_from(points, arms, 3, grid))
    page = (tmp_path / "sweep.html").read_text()
    assert (page.count("<table"), page.count('<svg role="img"')) == (1, 3)
    assert "<b>" not in page.replace("<b>Versions</b>", "")
    assert "jax 1.2.3" in page
    assert colors_by_arm(page) == {"tied": {"arm0"}, "&lt;b&gt;": {"arm1"}}
    assert page.count('href="here/report.html"') == 2 * len(points)
    assert page.count("<td>0.248</td>") == len(points)  # the mean on a logit scale, of the tied arm alone
    assert "src=" not in page
    assert all(f">{tick}</text>" in page for tick in ticks)
