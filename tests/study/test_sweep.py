"""Points of a grid."""

import json

import pytest

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.config import override
from tied_lm.study import sweep

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
