"""Points of a grid, and what they say together."""

import itertools
import json

import numpy as np
import pytest

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.config import override
from tied_lm.intervals import summarize
from tied_lm.study import sweep
from tied_lm.study.sweepreport import sentences, table_rows, write_sweep_page

RATE, WIDTH = "optimizer.learning_rate", "model.features"


@pytest.fixture
def small(values):
    for text in tiny.FIELDS:
        override(values, *text.split("="))
    return values


def test_a_grid_is_read_with_the_types_of_its_fields(small):
    texts = [f"{WIDTH}=4,8", f"{RATE}=1e-3, 1", "model.scale_input=true,false", "model.body=none,mlp"]
    assert sweep.read_grid(small, texts) == {
        WIDTH: [4, 8],
        RATE: [0.001, 1.0],
        "model.scale_input": [True, False],
        "model.body": ["none", "mlp"],
    }


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "at least one --grid"),
        (["model.features"], "field=value,value"),
        (["model.features=4", "model.features=8"], "each field once"),
        (["model.features=4,4"], "4 is there twice"),
        (["optimizer.learning_rate=1,1.0"], "1.0 is there twice"),
        (["model.features=4,x"], "model.features = 'x' is not possible; allowed: a whole number"),
        (["model.feature=4"], "no such field"),
        (["model.tying=tied,untied"], "a field that no arm sets itself; compare.arms.tied = 'model.tying=tied'"),
        (["compare.seeds=1,2"], "a field that may differ"),
        (
            ["seed=" + ",".join(map(str, range(100))), "data.seed=" + ",".join(map(str, range(11)))],
            "at most 1,000 points; these are 1,100",
        ),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(small, texts, words):
    with pytest.raises(ConfigError) as error:
        sweep.read_grid(small, texts)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_points_are_comparisons_in_readable_folders(small, tmp_path):
    grid = {WIDTH: [4, 8], "data.reversibility": [0.0, 0.5]}
    points = sweep.Sweep.of(small, grid, tmp_path).points
    assert [point.place.name for point in points] == [
        "000-features=4-reversibility=0",
        "001-features=4-reversibility=0.5",
        "002-features=8-reversibility=0",
        "003-features=8-reversibility=0.5",
    ]
    for point in points:
        for config in point.plan.comparison.arms.values():
            assert (config.model.features, config.data.reversibility) == tuple(point.settings.values())
    assert points[0].plan.arms["tied"].stream is not points[1].plan.arms["tied"].stream
    assert small["model"]["features"] == 4  # the base is not changed


def test_any_text_may_stand_in_a_folder_name(small, tmp_path):
    grid = {"compare.arms.tied": ["model.tying=tied model.init_std=0.1", "model.tying=tied ../../x"]}
    with pytest.raises(ConfigError, match=r"compare\.arms\.tied"):
        sweep.Sweep.of(small, grid, tmp_path)
    grid["compare.arms.tied"].pop()
    assert sweep.Sweep.of(small, grid, tmp_path).points[0].place.name == "000-tied=model.tying=tied-model.init_std=0.1"


def test_a_mistake_in_any_point_shows_before_anything_is_written(small, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.classes = 21"):
        sweep.Sweep.of(small, {"data.classes": [4, 21]}, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_a_folder_of_another_sweep_is_refused_by_naming_what_differs(small, tmp_path):
    place = tmp_path / "sweep"
    sweep.Sweep.of(small, {WIDTH: [4, 8]}, place).open()
    sweep.Sweep.of(small, {WIDTH: [4, 8]}, place).open()
    with pytest.raises(ConfigError, match=r"grid\.model\.features: \[4, 8\] -> \[4, 9\]"):
        sweep.Sweep.of(small, {WIDTH: [4, 9]}, place).open()
    small["train"]["steps"] = 40
    with pytest.raises(ConfigError, match=r"train\.steps: 39 -> 40"):
        sweep.Sweep.of(small, {WIDTH: [4, 8]}, place).open()
    assert json.loads((place / "sweep.json").read_text())["grid"] == {WIDTH: [4, 8]}


def test_more_seeds_may_be_added(small, tmp_path):
    small["compare"]["seeds"] = 2
    sweep.Sweep.of(small, {WIDTH: [4]}, tmp_path).open()
    small["compare"]["seeds"] = 3
    sweep.Sweep.of(small, {WIDTH: [4]}, tmp_path).open()
    small["compare"]["seeds"] = 2
    with pytest.raises(ConfigError, match=r"compare\.seeds"):
        sweep.Sweep.of(small, {WIDTH: [4]}, tmp_path).open()


def against_baseline(losses, baseline):
    """What a point holds of the losses of its arms, by seed; None is that of an arm that diverged."""
    base = losses[baseline]
    return {
        "eval_loss": {arm: None if values is None else summarize(values) for arm, values in losses.items()},
        "differences": {
            arm: None if values is None or base is None else summarize(np.subtract(values, base))
            for arm, values in losses.items()
            if arm != baseline
        },
    }


def results_of(losses, rates, widths=(8,), diverged=()):
    """The results of a sweep over widths and rates, from losses[arm][width, rate, seed]."""
    points = []
    for w, width in enumerate(widths):
        for r, rate in enumerate(rates):
            per_seed = {arm: None if (arm, rate) in diverged else table[w, r].tolist() for arm, table in losses.items()}
            about = {"index": len(points), "settings": {WIDTH: width, RATE: rate}, "folder": ""}
            about |= {"parameters": dict.fromkeys(losses, 10)}
            about |= {"diverged": {arm: "no longer finite" for arm, values in per_seed.items() if values is None}}
            points.append(about | against_baseline(per_seed, "untied"))
    seeds = losses["untied"].shape[2]
    about = {
        "arms": list(losses),
        "baseline": "untied",
        "matched": False,
        "seeds": seeds,
        "grid": {WIDTH: list(widths), RATE: list(rates)},
    }
    return about | {"points": points} | sweep.own_best_rates(points, "untied")


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
    for w, combination in enumerate(results_of(losses, RATES, (8, 16))["combinations"]):
        assert combination["settings"] == {WIDTH: (8, 16)[w]}
        assert combination["best_for_baseline"] == 4 * w + 1
        base_S = own_by_hand(losses["untied"][w])
        for arm in ("tied", "scaled"):
            own = combination["own"][arm]
            own_S = own_by_hand(losses[arm][w])
            np.testing.assert_allclose(own["eval_loss"]["per_seed"], own_S, rtol=1e-12)
            d_S = own_S - base_S
            np.testing.assert_allclose(own["difference"]["mean"], d_S.mean(), rtol=1e-9)
            assert own["difference"]["ci95"] is None  # fewer than 6 seeds describe
            assert own["rates"] == {RATE: RATES[int(np.argmin(losses[arm][w].mean(axis=1)))]}
        assert combination["own"]["tied"]["rates"] == {RATE: 1.0}
        assert combination["own"]["untied"]["difference"] is None


def test_a_shared_rate_is_compared_seed_by_seed():
    losses = {"tied": np.array([[[4.0, 5.0], [3.0, 3.5]]]), "untied": np.array([[[3.9, 4.7], [3.1, 3.1]]])}
    first, second = results_of(losses, (0.1, 1.0))["points"]
    assert first["differences"]["tied"]["per_seed"] == pytest.approx([0.1, 0.3])
    assert second["differences"]["tied"]["mean"] == pytest.approx(0.15)


def test_a_choice_on_the_same_seeds_would_be_too_good():
    # Both arms draw from one law at every rate, so in truth there is nothing to gain by choosing.
    rng = np.random.default_rng(1)
    own, naive = [], []
    for _ in range(400):
        losses_RxS = rng.normal(0, 1, (4, 3))
        (combination,) = results_of({"untied": losses_RxS[None]}, RATES)["combinations"]
        own.append(combination["own"]["untied"]["eval_loss"]["mean"])
        naive.append(losses_RxS.mean(axis=1).min())
    assert abs(np.mean(own)) < 4 * np.std(own) / 20
    assert np.mean(naive) < -0.5


def test_a_best_rate_at_the_edge_is_told():
    losses = {arm: np.full((1, 3, 2), 4.0) for arm in ("tied", "untied")}
    losses["tied"][0, 2], losses["untied"][0, 1] = 3.0, 3.0
    results = results_of(losses, RATES[:3])
    assert results["combinations"][0]["own"]["tied"]["at_edge"] == [RATE]
    assert results["combinations"][0]["own"]["untied"]["at_edge"] == []
    text = " ".join(sentences(results))
    assert "tied at learning_rate=1 (at the edge of the grid in learning_rate: a better one may lie beyond)" in text
    assert "untied at learning_rate=0.1." in text
    rows = table_rows(results)
    assert [row[1] for row in rows] == ["learning_rate", "0.01", "0.1 *", "1", "own best (edge)"]


def test_a_diverged_arm_is_never_chosen_and_named(tmp_path):
    losses = {arm: np.array([[[4.0, 4.1], [3.0, 3.1], [2.0, 2.1]]]) for arm in ("tied", "untied")}
    results = results_of(losses, RATES[:3], diverged=[("tied", 1.0)])
    own = results["combinations"][0]["own"]
    assert (own["tied"]["rates"][RATE], own["untied"]["rates"][RATE]) == (0.1, 1.0)
    assert own["tied"]["at_edge"] == []  # a higher rate was tried
    assert own["tied"]["difference"]["per_seed"] == pytest.approx([1.0, 1.0])
    last = table_rows(results)[3]
    assert (last[3], last[4], last[5]) == ("-", "diverged", "2.0500")
    assert "Diverged in some seed, and count as an infinite loss" in sentences(results)[-1]
    assert "tied at features=8, learning_rate=1" in sentences(results)[-1]
    json.loads(json.dumps(results, allow_nan=False))
    write_sweep_page(tmp_path, results)


def test_an_arm_that_diverges_everywhere_has_no_best_rate(tmp_path):
    losses = {arm: np.full((1, 2, 2), 4.0) for arm in ("tied", "untied")}
    results = results_of(losses, RATES[:2], diverged=[("untied", 0.01), ("untied", 0.1)])
    (combination,) = results["combinations"]
    assert combination["own"]["untied"] is None
    assert combination["best_for_baseline"] is None
    assert combination["own"]["tied"]["difference"] is None
    assert "untied diverged at every one" in " ".join(sentences(results))
    write_sweep_page(tmp_path, results)


def test_one_seed_has_no_interval_and_says_so(tmp_path):
    losses = {"tied": np.array([[[4.0], [3.0]]]), "untied": np.array([[[3.5], [3.6]]])}
    results = results_of(losses, RATES[:2])
    assert results["combinations"][0]["own"]["tied"]["difference"] == {"mean": -0.5, "ci95": None, "per_seed": [-0.5]}
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
    points = []
    for index, combination in enumerate(itertools.product(*grid.values())):
        losses = {arm: rng.normal(4, 0.1, 3).tolist() for arm in ("tied", "<b>", "untied")}
        about = {"index": index, "settings": dict(zip(grid, combination, strict=True)), "folder": "", "diverged": {}}
        points.append(about | {"parameters": dict.fromkeys(losses, 1)} | against_baseline(losses, "untied"))
    about = {"arms": list(losses), "baseline": "untied", "matched": False, "seeds": 3, "grid": grid, "points": points}
    write_sweep_page(tmp_path, about | sweep.own_best_rates(points, "untied"))
    page = (tmp_path / "sweep.html").read_text()
    assert (page.count("<table"), page.count("<svg")) == (1, 1)
    assert "<b>" not in page
    assert "src=" not in page
    assert all(f"<!-- {tick} -->" in page for tick in ticks)
