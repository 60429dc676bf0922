"""What TensorBoard shows of all runs together, read back by its own code."""

import json
import re
import shlex
import threading
import warnings
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from google.protobuf import text_format
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

from configs import toy
from tests import tiny
from tied_lm import open_run
from tied_lm.config import override
from tied_lm.files import read_json
from tied_lm.study import comparison
from tied_lm.study.board import COLORS, deep_link
from tied_lm.study.meanruns import CATEGORIES, _in_charts
from tied_lm.study.summary import read_summary
from tied_lm.study.sweep import Sweep, read_grid
from tied_lm.study.sweepboard import write_sweep_board

pytestmark = pytest.mark.slow  # a comparison and a sweep are trained
SEEDS = 2


def values_of(*overrides):
    values = toy.get_config().to_dict()
    for text in (*tiny.FIELDS, f"compare.seeds={SEEDS}", *overrides):
        override(values, *text.split("="))
    return values


def nothing(arm, seed):
    return lambda updates: None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A finished comparison of a tied and an untied arm."""
    found = tmp_path_factory.mktemp("board") / "compared"
    comparison.complete(found, tiny.plan_of(values_of()), threading.Event(), nothing)
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A finished sweep of two points."""
    found = tmp_path_factory.mktemp("board") / "swept"
    values = values_of()
    sweep = Sweep.of(values, read_grid(values, ["data.reversibility=0,1"]), found)
    sweep.open()
    for point in sweep.points:
        comparison.complete(point.place, point.plan, threading.Event(), nothing)
    write_sweep_board(sweep)
    return found, sweep


def scalars(place):
    accumulator = tiny.accumulate(place)
    return {tag: {e.step: e.value for e in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}


def test_the_mean_runs_end_at_what_the_verdict_says(place):
    summary = read_summary(place)
    for name, arm in summary.arms.items():
        found = scalars(place / "mean" / name)
        expected = {"loss/eval": arm.eval_loss, "loss/excess": arm.excess}
        if name in summary.differences:
            expected["loss/less_untied"] = summary.differences[name]
        for band, of_band in arm.bands.items():
            expected[f"loss/of_band/{band}"] = of_band.loss
            if arm.tied:
                expected |= {f"probe/band/{band}/{key}": getattr(of_band, key) for key in ("share", "cosine")}
        if arm.split:
            expected |= {"probe/split/share": arm.split.share, "probe/split/cosine": arm.split.cosine}
        expected = {tag: one for tag, one in expected.items() if one is not None}
        for tag, one in expected.items():
            ends = one.shown or (one.mean, one.mean)
            told = [found[f"seeds/{tag}/{end}"][39] for end in ("mean", "low", "high")]
            assert told == pytest.approx([one.mean, *ends], rel=1e-6), (name, tag)
            assert found[tag][39] == pytest.approx(one.mean, rel=1e-6)
        assert {tag.split("/", 1)[1].rpartition("/")[0] for tag in found if tag.startswith("seeds/")} >= {*expected}
        assert list(found["loss/eval"]) == tiny.EVALUATION_STEPS
        assert len(found) < 120


def test_what_a_single_batch_says_of_bands_is_mostly_left_to_the_probe(place):
    for arm in ("tied", "untied"):
        run = place / arm / "seed0"
        found = scalars(run)
        assert len(found) <= 120
        of_bands = {tag for tag in found if "single_batch/band" in tag}
        assert bool(of_bands) == (arm == "tied")  # share and cosine; those of an untied arm are hypothetical
        assert not [tag for tag in of_bands if tag.endswith(("/lookup", "/scoring", "/pull", "/push", "/total"))]
        assert {"probe/band/1/pull", "probe/band/1/push"} <= set(found)
        assert len(open_run(run).scalars("band/1/push"))


def test_charts_are_of_the_mean_runs_alone(place):
    events = [event for folder in place.rglob("*") if folder.is_dir() for event in tiny.board_events(folder)]
    layouts = [v for e in events for v in e.summary.value if v.tag == "custom_scalars__config__"]
    (layout,) = [Layout.FromString(value.tensor.string_val[0]) for value in layouts]
    shown = [chart.margin.series for category in layout.category for chart in category.chart]
    assert all(len(series) == 1 for series in shown)
    tags = {tag for (one,) in shown for tag in (one.value, one.lower, one.upper)}
    of_mean = [set(scalars(place / "mean" / name)) for name in ("tied", "untied")]
    assert tags <= set.union(*of_mean)
    assert not any(tag in scalars(place / "tied" / "seed0") for tag in tags)


def test_no_chart_has_more_than_six_lines():
    arms = [f"a{k}" for k in range(13)]
    found = _in_charts(arms, "a3")
    for chart in {chart for of_arm in found.values() for chart in of_arm}:
        assert 2 <= sum(chart in of_arm for of_arm in found.values()) <= 6
        assert chart in found["a3"]
    assert set(found) == set(arms)


def test_the_charts_of_a_sweep_are_of_one_point_each(swept):
    """What a chart shows of the runs in which its tag stands; those of a kind stand side by side."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin  # which brings html5lib

    place, sweep = swept
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(place)).Reload()
    plugin = CustomScalarsPlugin(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(place))))
    layout = json.loads(plugin.layout_impl(RequestContext(), ""))
    having = Counter(tag for run in multiplexer.Runs().values() for tag in run["tensors"])
    names = [point.place.name for point in sweep.points]
    assert [category["title"] for category in layout["category"]] == list(CATEGORIES)
    for category in layout["category"]:
        titles = [chart["title"] for chart in reversed(category["chart"])]
        assert len(set(titles)) == len(titles)
        assert [title.rpartition(", at ")[2] for title in titles] == names * (len(titles) // 2)
        for chart in category["chart"]:
            (series,) = chart["margin"]["series"]
            assert 1 <= having[series["value"]] <= 2
    runs = [f"{names[0]}/tied/seed0", f"{names[1]}/mean/tied", "tied/seed12", "mean/tied"]
    colors = COLORS.removeprefix("regex:")
    assert {re.search(colors, run)[1] for run in runs} == {"tied"}
    asked = parse_qs(urlsplit(deep_link(read_summary(sweep.points[0].place), of_sweep=True)).query)
    assert [bool(re.search(asked["runFilter"][0], run)) for run in runs] == [False, True, False, False]


def groups_of(place):
    """The table of runs, by TensorBoard's own code."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(place))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(place))
    context = backend_context.Context(TBContext(data_provider=provider))
    request = RequestContext()
    experiment = get_experiment.Handler(request, context, "", api_pb2.GetExperimentRequest()).run()
    asked = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=100,
        aggregation_type=api_pb2.AGGREGATION_AVG,
        allowed_statuses=[api_pb2.STATUS_SUCCESS],
        col_params=[
            *(api_pb2.ColParams(metric=info.name, include_in_result=True) for info in experiment.metric_infos),
            *(api_pb2.ColParams(hparam=info.name, include_in_result=True) for info in experiment.hparam_infos),
        ],
    )
    found = list_session_groups.Handler(request, context, "", asked).run().session_groups
    return experiment, found


def test_the_table_of_runs_has_the_averages(place):
    experiment, groups = groups_of(place)
    assert {info.name for info in experiment.hparam_infos} == {"arm", "model.tying"}
    summary = read_summary(place)
    assert {group.name for group in groups} == set(summary.arms)
    for group in groups:
        assert len(group.sessions) == SEEDS
        told = {value.name.tag: value.value for value in group.metric_values}
        arm = summary.arms[group.name]
        assert told["loss/eval"] == pytest.approx(arm.eval_loss.mean, rel=1e-6)
        assert told["loss/excess"] == pytest.approx(arm.excess.mean, rel=1e-6)
        assert told["size/parameters"] == arm.parameters
        shares = [open_run(place / group.name / f"seed{k}").last().get("probe/split/share") for k in range(SEEDS)]
        assert ("probe/split/share" in told) == arm.tied
        assert not arm.tied or told["probe/split/share"] == pytest.approx(np.mean(shares), rel=1e-6)


def test_a_sweep_is_one_table_of_averages(swept):
    place, sweep = swept
    experiment, groups = groups_of(place)
    assert {info.name for info in experiment.hparam_infos} == {"arm", "model.tying", "data.reversibility"}
    assert len(groups) == 4
    for point in sweep.points:
        for name, arm in read_summary(point.place).arms.items():
            (group,) = [one for one in groups if one.name == f"{name} at {point.place.name}"]
            told = {value.name.tag: value.value for value in group.metric_values}
            assert told["loss/eval"] == pytest.approx(arm.eval_loss.mean, rel=1e-6)
            assert group.hparams["data.reversibility"].number_value == point.settings["data.reversibility"]


def is_number(text):
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text) is not None


def test_the_projector_has_the_matrices_and_what_is_known_of_each_row(place):
    for name, matrices in {"tied": ("embedding",), "untied": ("embedding", "output")}.items():
        folder = place / "mean" / name
        config = text_format.Parse((folder / "projector_config.pbtxt").read_text(), ProjectorConfig())
        assert [one.tensor_path for one in config.embeddings] == [f"{matrix}.tsv" for matrix in matrices]
        assert all("all rows, seed 0, step 39" in one.tensor_name for one in config.embeddings)
        run = open_run(place / name / "seed0")
        saved = tiny.saved_state(run.folder, run.config).params
        head, *lines = [line.split("\t") for line in (folder / "rows.tsv").read_text().splitlines()]
        rows = [int(line[head.index("id")]) for line in lines]
        for matrix in matrices:
            np.testing.assert_allclose(np.loadtxt(folder / f"{matrix}.tsv"), np.asarray(saved[matrix])[rows], rtol=1e-5)
        with run.probe as probe:
            lookup = [float(line[head.index("lookup")]) for line in lines]
            np.testing.assert_allclose(lookup, probe["lookup"].values[-1][rows], rtol=1e-3)
            assert (np.diff(probe["frequency"].values[rows]) <= 0).all()
        # The projector shows the first column that is not all numbers, and has a scale of colours for those that are.
        columns = dict(zip(head, zip(*lines, strict=True), strict=True))
        texts = [name for name, values in columns.items() if any(value and not is_number(value) for value in values)]
        assert texts == ["token"]
        assert columns["token"][0] == f"#{rows[0]}"
        assert ("share" in head) == (name == "tied")


def test_the_pictures_are_those_of_the_parts(place):
    for name, more in {"tied": {"share", "cosine", "total"}, "untied": set()}.items():
        values = [v for e in tiny.board_events(place / "mean" / name) for v in e.summary.value]
        images = {v.tag.removeprefix("rows_map/"): v for v in values if v.HasField("image")}
        assert set(images) == {"lookup", "scoring", "pull", "push"} | more
        for image in images.values():
            assert image.image.encoded_image_string.startswith(b"\x89PNG")
            assert image.metadata.summary_description


def test_the_deep_link_is_one_word_of_the_shell_and_names_tags_that_exist(place):
    link = deep_link(read_summary(place))
    assert shlex.split(shlex.quote(link)) == [link]
    asked = parse_qs(urlsplit(link).query)
    assert asked["smoothing"] == ["0"]
    tags = {one["tag"] for one in json.loads(asked["pinnedCards"][0])}
    assert tags <= set(scalars(place / "tied" / "seed0"))
    assert read_json(place / "summary.json", "")["baseline"] == "untied"
