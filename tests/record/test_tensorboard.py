"""What TensorBoard shows, read back from the event files."""

import json
import os

import numpy as np
import pytest
from tensorboard.util import tensor_util

from tests import tiny
from tied_lm import open_run
from tied_lm.files import read_json
from tied_lm.record.histogram import BINS, EDGES, log_histogram
from tied_lm.record.tensorboard import Board, cut_events

STRINGS = {"frequent_0": "0", "middle_10": "10", "rare_19": "19", "named_7": "7"}
PARTS = ("lookup", "scoring", "pull", "push", "total")
BANDS = range(5)


@pytest.fixture(scope="module", params=["tied", "untied"])
def run(request, tmp_path_factory):
    """A finished run: its tying and its folder."""
    place = tmp_path_factory.mktemp("board") / "run"
    tiny.train(place, tiny.make_config(f"model.tying={request.param}", "log.tokens=7"))
    return request.param, place


def geometry_tags(tied):
    """What is shown: the rest of the geometry is in metrics.jsonl alone."""
    fields = ["effective_rank", "mean_row", "mean_cosine", "norm_slope", "cosine_to_start"]
    tags = [f"geometry/{name}/{field}" for name in ("embedding", "output")[: 1 if tied else 2] for field in fields]
    return tags if tied else [*tags, "geometry/likeness/spearman", "geometry/likeness/cka"]


def expected_scalars(tied):
    """Steps by tag, as the documentation names them."""
    tags = dict.fromkeys(
        ["loss/eval", "loss/excess", "loss/law", *(f"band/{b}/loss" for b in BANDS)], tiny.EVALUATION_STEPS
    )
    tags |= dict.fromkeys(["loss/train", "optimizer/clipped"], tiny.SCALAR_STEPS[1:])
    tags["time/seconds"] = tiny.SCALAR_STEPS
    tags["time/ms_per_update"] = tiny.SCALAR_STEPS[1:]
    # The first call of each compiles it.
    tags |= {"time/ms_of_evaluation": tiny.EVALUATION_STEPS[1:], "time/ms_of_probe": tiny.PROBE_STEPS[1:]}
    for prefix, steps in (("", tiny.ROW_STEPS), ("probe/", tiny.PROBE_STEPS)):
        names = [f"grad_norm/{part}" for part in PARTS] + ["split/share", "split/cosine"]
        names += [f"band/{b}/{name}" for b in BANDS for name in (*PARTS, "share", "cosine")]
        tags |= {prefix + name: steps for name in names}
    names = [f"rows_zero/{part}" for part in PARTS]
    tags |= dict.fromkeys(["split/residual", *names], tiny.ROW_STEPS)
    names = [f"probe/token/{token}/{name}" for token in STRINGS for name in (*PARTS, "share", "cosine")]
    tags |= dict.fromkeys(names, tiny.PROBE_STEPS)
    tags["probe/tokens"] = tiny.PROBE_STEPS
    tags |= dict.fromkeys([*geometry_tags(tied), *tiny.SHOWN_PREDICTIONS], tiny.PROBE_STEPS)
    if tied:
        return tags
    return {hypothetical(tag): steps for tag, steps in tags.items()}


def undefined_scalars(place, tied):
    """Tags and steps of what is 0 / 0, by the norms of the rows and of their moves."""
    found = set()
    for prefix, name in (("", "rows.zarr"), ("probe/", "probe.zarr")):
        rows = tiny.dataset(place / name)
        groups = {"split": rows["band"] >= 0} | {f"band/{b}": rows["band"] == b for b in BANDS}
        for k, step in enumerate(rows["step"].tolist()):
            for group, members in groups.items():
                uses = [rows[part][k][members].any() for part in ("lookup", "scoring")]
                found |= {(f"{prefix}{group}/cosine", step)} if not all(uses) else set()
                found |= {(f"{prefix}{group}/share", step)} if not any(uses) else set()
            for token, string in STRINGS.items() if prefix else ():
                uses = [rows[part][k][int(string)] for part in ("lookup", "scoring")]
                found |= {(f"probe/token/{token}/cosine", step)} if not all(uses) else set()
                found |= {(f"probe/token/{token}/share", step)} if not any(uses) else set()
    found = found if tied else {(hypothetical(tag), step) for tag, step in found}
    # Two rows have to have moved for one to have gone the way of another; `rows` is the probe.
    for name, field in ({"embedding": ""} if tied else {"embedding": "_embedding", "output": "_output"}).items():
        for band in BANDS:
            moved = np.count_nonzero(rows[f"distance_to_start{field}"][:, rows["band"] == band], axis=1)
            found |= {(f"geometry/{name}/band/{band}/common_drift", s) for s in rows["step"][moved < 2].tolist()}
    return found


def hypothetical(tag):
    if tag.rsplit("/", 1)[-1] not in ("total", "share", "cosine"):
        return tag
    return "hypothetical/" + tag


def on_board(tag):
    return tiny.board_tag(tag, STRINGS)


def test_every_scalar_is_there_with_finite_values_at_its_steps(run):
    tying, place = run
    accumulator = tiny.accumulate(place)
    expected, undefined = expected_scalars(tying == "tied"), undefined_scalars(place, tying == "tied")
    expected = {
        tag: found for tag, steps in expected.items() if (found := [s for s in steps if (tag, s) not in undefined])
    }
    expected = {tag: steps for tag, steps in expected.items() if not tiny.is_aside(tag)}
    assert set(accumulator.Tags()["scalars"]) == {on_board(tag) for tag in expected}
    assert len(expected) <= 120  # of which 7 are of a token that was named
    for tag, steps in expected.items():
        found = accumulator.Scalars(on_board(tag))
        assert [event.step for event in found] == steps, tag
        assert np.isfinite([event.value for event in found]).all(), tag


def test_the_metrics_are_the_same_scalars(run):
    _, place = run
    accumulator = tiny.accumulate(place)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(
        {*tiny.ROW_STEPS, *tiny.EVALUATION_STEPS, *tiny.SCALAR_STEPS, *tiny.PROBE_STEPS}
    )
    defined = {tag for line in lines for tag, value in line.items() if value is not None}
    tags = {tag for tag in defined if not tiny.is_aside(tag)}
    assert {on_board(tag) for tag in tags - {"step"}} == set(accumulator.Tags()["scalars"])
    for tag in tags - {"step"}:
        shown = {event.step: event.value for event in accumulator.Scalars(on_board(tag))}
        told = {line["step"]: line[tag] for line in lines if tag in line}
        assert shown == {step: np.float32(value) for step, value in told.items() if value is not None}, tag


def test_what_is_undefined_is_so_in_every_place(run):
    """NaN in zarr and from Python, null in JSON, absent in TensorBoard, and never 0."""
    tying, place = run
    for name in ("rows.zarr", "probe.zarr"):
        rows = tiny.dataset(place / name)
        no_cosine = (rows["lookup"] == 0) | (rows["scoring"] == 0)
        assert no_cosine.any()
        np.testing.assert_array_equal(np.isnan(rows["cosine"]), no_cosine)
    undefined = undefined_scalars(place, tying == "tied")
    assert undefined  # at two steps band 0, which is a single row, was not looked up
    told = (place / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in told]
    opened = open_run(place)
    assert {(tag, line["step"]) for line in lines for tag, value in line.items() if value is None} == undefined
    nans = {(tag, step) for tag in opened.tags() for step, value in opened.scalars(tag).items() if np.isnan(value)}
    assert nans == undefined
    assert not {(on_board(tag), step) for tag, step in undefined} & raw_values(place).keys()


def test_every_histogram_counts_the_rows_that_are_not_zero(run):
    tying, place = run
    rows = tiny.dataset(place / "rows.zarr")
    histograms = {key: value for key, value in raw_values(place).items() if value.HasField("histo")}
    prefix = {part: "untied_hypothetical/" if (tying, part) == ("untied", "total") else "" for part in PARTS}
    expected = {f"{prefix[part]}rows/{part}": part for part in PARTS}
    assert set(histograms) == {(tag, step) for tag in expected for step in tiny.ROW_STEPS}
    assert any((rows["lookup"] == 0).ravel())
    for (tag, step), value in histograms.items():
        norms = rows[expected[tag]][tiny.ROW_STEPS.index(step)].astype(np.float64)
        logs = np.log10(norms[norms > 0])
        np.testing.assert_array_equal(value.histo.bucket_limit, EDGES[1:])
        np.testing.assert_array_equal(value.histo.bucket, np.histogram(logs, EDGES)[0])
        assert value.histo.num == sum(value.histo.bucket) == logs.size
        width = EDGES[1] - EDGES[0]
        assert value.histo.sum == pytest.approx(logs.sum(), abs=width / 2 * logs.size)
        assert logs.min() - width <= value.histo.min <= logs.min()
        assert logs.max() <= value.histo.max <= logs.max() + width
    zeros = {event.step: event.value for event in tiny.accumulate(place).Scalars("single_batch/rows_zero/lookup")}
    assert zeros == pytest.approx(dict(zip(tiny.ROW_STEPS, np.mean(rows["lookup"] == 0, axis=1), strict=True)))


def test_histograms_read_back_by_tensorboard(run):
    _, place = run
    found = tiny.accumulate(place).Histograms("rows/scoring")
    assert [event.step for event in found] == tiny.ROW_STEPS
    assert [event.histogram_value.num for event in found] == [20] * len(tiny.ROW_STEPS)


def raw_values(place):
    return {(value.tag, event.step): value for event in tiny.board_events(place) for value in event.summary.value}


def text_of(place, tag):
    value = raw_values(place)[f"{tag}/text_summary", 0]
    return tensor_util.make_ndarray(value.tensor).item().decode()


def test_the_config_and_the_followed_tokens_as_text(run):
    _, place = run
    config = text_of(place, "config").removeprefix("```json\n").removesuffix("\n```")
    assert json.loads(config) == read_json(place / "config.json", "")
    tokens = text_of(place, "tokens")
    assert "| frequent_0 | 0 | 0 |" in tokens
    assert "| named_7 | 7 | 7 |" in tokens


def test_every_card_says_what_it_shows(run):
    """In what, of which rows, over what; the groups come in the order of importance; named tokens show their text."""
    tying, place = run
    about = {}
    for value in (value for event in tiny.board_events(place) for value in event.summary.value):
        about.setdefault(value.tag, value.metadata.summary_description)
    about = {tag: text for tag, text in about.items() if not tag.endswith("/text_summary")}
    assert all(about.values())
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(about)))
    last = [] if tying == "tied" else ["untied_hypothetical"]
    rows = ["rows", "rows_followed", "rows_geometry"]
    assert groups == ["loss", "probe", "probe_predictions", *rows, "single_batch", "time", *last]
    norm = "L2 norm of the gradient that comes from looking up, nats / parameter"
    assert about["probe/band/3/lookup"].startswith(f"{norm}; rows of band 3 (0: most frequent); over the probe")
    assert about["single_batch/split/residual"].endswith("In Python: `open_run(...).scalars('split/residual')`")
    assert "log10" in about["rows/lookup"]
    assert "the row of token 7 (named, id 7)" in about["rows_followed/named_7 7/lookup"]
    hypothetical = {text.startswith("Hypothetical") for tag, text in about.items() if tag.startswith("untied_")}
    assert hypothetical == (set() if tying == "tied" else {True})


@pytest.fixture
def board(tmp_path):
    opened = Board(tmp_path, 0)
    yield opened
    opened.close()


def test_edges():
    assert (EDGES[0], EDGES[-1]) == (-12, 2)
    np.testing.assert_allclose(np.diff(EDGES), 0.1)


def test_a_part_that_is_all_zero_writes_nothing(board, tmp_path):
    board.histogram(3, "rows/lookup", np.asarray(log_histogram(np.zeros(5, np.float32))))
    board.flush()
    assert not tiny.board_events(tmp_path)


def test_norms_beyond_the_edges_are_counted_at_the_edges(board, tmp_path):
    norms = np.array([0, 1e-30, 1e-12, 1.0, 1e2, 1e9], np.float32)
    board.histogram(3, "rows/pull", np.asarray(log_histogram(norms)))
    board.flush()
    histogram = raw_values(tmp_path)["rows/pull", 3].histo
    assert (histogram.bucket[0], histogram.bucket[-1], histogram.num) == (2, 2, 5)
    assert (histogram.min, histogram.max) == (-12, 2)


def test_a_flush_leaves_nothing_behind(board, tmp_path):
    for step in range(100):
        board.scalars(step, {"a": step, "b": 0.5})
    board.flush()
    assert len(raw_values(tmp_path)) == 200


def test_writers_of_one_second_do_not_share_a_file(tmp_path):
    for k in range(3):
        board = Board(tmp_path, 100)
        board.scalars(k, {"a": k})
        board.close()
    assert {key: value.simple_value for key, value in raw_values(tmp_path).items()} == {("a", k): k for k in range(3)}


@pytest.mark.parametrize("torn", [0, 1, 8, 11, 12, 20, 30])
def test_a_cut_keeps_what_is_whole_and_before_the_step(tmp_path, torn):
    board = Board(tmp_path, 0)
    board.text("config", "hello")
    for step in range(6):
        board.scalars(step, {"a": step})
        board.histogram(step, "h", np.ones(BINS, int))
    board.flush()
    (path,) = tmp_path.iterdir()
    whole = path.stat().st_size
    board.scalars(2, {"b": 1.0})
    board.close()
    assert path.stat().st_size > whole + torn
    os.truncate(path, whole + torn)
    cut_events(path, 4)
    assert set(raw_values(tmp_path)) == {("config/text_summary", 0)} | {(t, s) for t in "ah" for s in range(4)}
    # TensorBoard's reader knows a file by its first event.
    assert tiny.accumulate(tmp_path).file_version == 2.0
    assert list(tmp_path.iterdir()) == [path]


def test_a_cut_at_the_start_leaves_no_summary(tmp_path):
    board = Board(tmp_path, 0)
    board.text("config", "hello")
    board.scalars(0, {"a": 1.0})
    board.close()
    Board(tmp_path, 0).close()
    assert not tiny.board_events(tmp_path)


def test_a_file_torn_anywhere_is_cut_to_whole_events(tmp_path):
    board = Board(tmp_path, 0)
    for step in range(3):
        board.scalars(step, {"a": step})
    board.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    sizes = []
    for size in range(0, len(whole) + 1, 5):
        path.write_bytes(whole[:size])
        cut_events(path, 100)
        assert whole.startswith(path.read_bytes())
        sizes.append(path.stat().st_size)
    assert len(set(sizes)) == 5  # nothing, the version, and one more for each scalar
