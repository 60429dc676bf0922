"""What a run writes down, and where."""

import json

import numpy as np
import pytest

from tests import tiny
from tied_lm.bands import UNSEEN
from tied_lm.checks import ConfigError
from tied_lm.model.embedding import TiedEmbedding, UntiedEmbedding
from tied_lm.record.histogram import log_histogram
from tied_lm.record.history import RowLog
from tied_lm.record.reader import open_log
from tied_lm.record.recorder import WRITERS, writers_of
from tied_lm.record.rowtags import Rows
from tied_lm.record.runrecorder import ROWS, RunRecorder
from tied_lm.record.slots import Probe, Record, drift_field
from tied_lm.record.writer import Writer
from tied_lm.rows import DRIFT, PARTS, RowStats

V = 6
FREQUENCIES = np.array([0.1, 0.4, 0.0, 0.2, 0.3, 0.0])
BANDS = np.array([3, 0, UNSEEN, 2, 1, UNSEEN])
TOKENS = ["a|", "<b>", "`c", "d", "e", "f"]


@pytest.fixture
def open_recorder(tmp_path):
    opened = []

    def open_at(first_step=0, model=TiedEmbedding, untied_from=None, tokens=()):
        config = {"log": {"tokens": list(tokens), "writers": ["tensorboard"]}}
        rows = Rows(TOKENS, FREQUENCIES, BANDS, tokens)
        where = (tmp_path, first_step, config, model(V, 2), rows)
        opened.append(RunRecorder(*where, untied_from=untied_from, clusters=np.arange(2)))
        return opened[-1]

    yield open_at
    for recorder in opened:
        if not recorder.recorder.metrics.file.closed:
            recorder.close()


def stats(step):
    norms = {part: np.arange(V, dtype=np.float32) * (k + 1) + step for k, part in enumerate(RowStats._fields[:5])}
    return RowStats(**norms, cosine=np.full(V, 0.5), input_count=np.arange(V), target_count=np.arange(V))


def record(step, vocabulary=("embedding",)):
    by_parameter = {name: np.full(V, step + k, np.float32) for k, name in enumerate(vocabulary)}
    histograms = np.array([log_histogram(getattr(stats(step), part)) for part in PARTS])
    weights = {k: v + 0.5 for k, v in by_parameter.items()}
    return Record(stats(step), {}, by_parameter, weights, {}, histograms, np.float32(0))


def probed(step):
    return Probe(stats(step), {}, np.int32(9))


def drift(*names):
    fields = [drift_field(field, name, names) for name in names for field in DRIFT]
    return {field: np.arange(V, dtype=np.float32) / V for field in fields}


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_lands_everywhere(open_recorder, tmp_path):
    recorder = open_recorder()
    recorder.write(4, {"loss/train": 1.5}, record(4), probed(40), drift=drift("embedding"))
    recorder.flush()
    (line,) = lines_of(tmp_path)
    assert line["step"] == 4
    assert line["loss/train"] == 1.5
    assert line["grad_norm/lookup"] == pytest.approx(np.linalg.norm(np.arange(V) + 4))
    assert line["probe/grad_norm/lookup"] == pytest.approx(np.linalg.norm(np.arange(V) + 40))
    shown = tiny.board_values(tmp_path)
    strings = {"frequent_1": "<b>", "middle_3": "d", "rare_0": "a|"}
    curves = {tiny.board_tag(tag, strings) for tag in line if not tiny.is_aside(tag)} - {"step"}
    assert {tag for tag, step in shown if step == 4} == curves | {f"rows/{p}" for p in RowStats._fields[:5]}
    assert line["probe/token/middle_3/scoring"] == 3 * 2 + 40
    assert line["probe/token/middle_3/share"] == pytest.approx(43**2 / (43**2 + 46**2))
    assert line["probe/token/middle_3/cosine"] == pytest.approx(0.5)
    with open_log(tmp_path, "rows.zarr") as rows, open_log(tmp_path, "probe.zarr") as probe:
        assert set(rows.data_vars) == {*RowStats._fields, "update", "weight", "frequency", "band"}
        assert set(probe.data_vars) == {*RowStats._fields, *DRIFT, "frequency", "band"}
        np.testing.assert_array_equal(probe.distance_to_start, [np.arange(V, dtype=np.float32) / V])
        assert np.isnan(probe.cosine_to_start[0, 0])  # of a row that is 0
        assert not np.isnan(probe.cosine_to_start[0, 1:]).any()
        np.testing.assert_array_equal(rows.lookup, [np.arange(V) + 4])
        np.testing.assert_array_equal(rows["update"], [np.full(V, 4)])
        np.testing.assert_array_equal(rows.weight, [np.full(V, 4.5)])
        np.testing.assert_array_equal(probe.lookup, [np.arange(V) + 40])
        np.testing.assert_array_equal(rows.frequency, FREQUENCIES)
        np.testing.assert_array_equal(rows.band, BANDS)


def test_unseen_rows_are_a_band(open_recorder, tmp_path):
    recorder = open_recorder()
    recorder.write(0, {}, record(0))
    recorder.flush()
    (line,) = lines_of(tmp_path)
    assert line["band/unseen/lookup"] == pytest.approx(np.hypot(2, 5))
    assert "band/4/lookup" not in line


def test_an_untied_run_says_what_is_hypothetical(open_recorder, tmp_path):
    names = ("embedding", "output")
    recorder = open_recorder(model=UntiedEmbedding, untied_from=0)
    recorder.write(2, {}, record(2, names), probed(2), drift=drift(*names))
    recorder.flush()
    (line,) = lines_of(tmp_path)
    for tag in line:
        assert tag.rsplit("/", 1)[-1] not in ("total", "share", "cosine") or tag.startswith("hypothetical/"), tag
    with open_log(tmp_path, "rows.zarr") as rows:
        np.testing.assert_array_equal(rows.update_embedding, [np.full(V, 2)])
        np.testing.assert_array_equal(rows.update_output, [np.full(V, 3)])
        np.testing.assert_array_equal(rows.weight_output, [np.full(V, 3.5)])
        assert "update" not in rows
        assert {n for n in rows.data_vars if "hypothetical" in rows[n].attrs} == {"total", "cosine"}


def test_a_tied_run_has_nothing_hypothetical(open_recorder, tmp_path):
    recorder = open_recorder()
    recorder.write(2, {}, record(2), probed(2), drift=drift("embedding"))
    recorder.flush()
    assert not any("hypothetical" in tag for tag, _ in tiny.board_values(tmp_path))
    with open_log(tmp_path, "rows.zarr") as rows:
        assert not any("hypothetical" in rows[name].attrs for name in rows.variables)
        assert all(rows[name].attrs["units"] for name in (*RowStats._fields, "update", "weight"))


def test_tokens_are_followed(open_recorder, tmp_path):
    recorder = open_recorder(tokens=(2,))
    recorder.write(1, {}, record(1))
    recorder.flush()
    (line,) = lines_of(tmp_path)
    followed = {tag: value for tag, value in line.items() if tag.startswith("token/") and tag.endswith("/scoring")}
    # Rows of frequency 0 are never the rare one.
    assert followed == {
        "token/frequent_1/scoring": 3,
        "token/middle_3/scoring": 7,
        "token/rare_0/scoring": 1,
        "token/named_2/scoring": 5,
    }


def test_zeros_are_told_as_a_fraction(open_recorder, tmp_path):
    recorder = open_recorder()
    recorder.write(0, {}, record(0))
    recorder.flush()
    (line,) = lines_of(tmp_path)
    assert line["rows_zero/lookup"] == pytest.approx(1 / V)


def test_a_step_without_anything_is_no_line(open_recorder, tmp_path):
    recorder = open_recorder()
    recorder.write(3, {})
    recorder.close()
    assert lines_of(tmp_path) == []


def test_the_metrics_come_last(open_recorder, tmp_path, monkeypatch):
    recorder = open_recorder()
    recorder.write(1, {"loss/train": 1.0}, record(1), probed(1), drift=drift("embedding"))
    logs = [(log, "hold") for log in recorder.recorder.arrays.values()]
    for place, call in ((recorder.recorder.writers[0], "flush"), *logs):
        with monkeypatch.context() as patched:
            patched.setattr(place, call, lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                recorder.flush()
        assert lines_of(tmp_path) == []
    recorder.flush()
    assert len(lines_of(tmp_path)) == 1


def test_opening_cuts_what_will_be_written_again(open_recorder, tmp_path):
    recorder = open_recorder()
    for step in range(6):
        recorder.write(step, {"loss/train": float(step)}, record(step), probed(step), drift=drift("embedding"))
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss/tr')
    recorder = open_recorder(first_step=4)
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2, 3]
    for name in ("rows.zarr", "probe.zarr"):
        np.testing.assert_array_equal(tiny.dataset(tmp_path / name)["step"], [0, 1, 2, 3])
    for step in (4, 5):
        recorder.write(step, {"loss/train": float(step)}, record(step), probed(step), drift=drift("embedding"))
    recorder.close()
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(6))
    shown = {step for tag, step in tiny.board_values(tmp_path) if tag == "single_batch/grad_norm/total"}
    assert shown == set(range(6))
    assert ("config/text_summary", 0) in tiny.board_values(tmp_path)


def test_starting_again_says_everything_once(open_recorder, tmp_path):
    open_recorder().close()
    open_recorder().close()
    assert {tag for tag, _ in tiny.board_values(tmp_path)} == {
        "config/text_summary",
        "tokens/text_summary",
    }


def test_many_steps_are_not_kept_in_memory(open_recorder):
    recorder = open_recorder()
    for step in range(100):
        recorder.write(step, {}, record(step))
        assert len(recorder.recorder.arrays[ROWS].pending) < 33
    assert isinstance(recorder.recorder.arrays[ROWS], RowLog)


def test_tokens_do_not_break_the_table(open_recorder, tmp_path):
    open_recorder(tokens=[0, 1, 2]).close()
    (path,) = tmp_path.glob("events.*")
    written = path.read_bytes().decode("latin1")
    for row in ("| named_0 | 0 | a&#124; |", "| named_1 | 1 | &#60;b&#62; |", "| named_2 | 2 | &#96;c |"):
        assert row in written


class Memory(Writer):
    """A writer as somebody else may add it."""

    def __init__(self, folder, first_step, label=""):
        self.seen = []

    def scalars(self, step, values):
        self.seen.append(("scalars", step, sorted(values)))

    def histogram(self, step, tag, counts):
        self.seen.append(("histogram", step, tag))


def test_another_writer_is_a_class_and_a_name(tmp_path, monkeypatch):
    monkeypatch.setitem(WRITERS, "memory", Memory)
    config = {"log": {"tokens": [], "writers": ["memory"]}}
    rows = Rows(TOKENS, FREQUENCIES, BANDS, ())
    recorder = RunRecorder(tmp_path, 0, config, TiedEmbedding(V, 2), rows, untied_from=None, clusters=np.arange(2))
    recorder.write(4, {"loss/train": 1.5}, record(4))
    recorder.close()
    (line,) = lines_of(tmp_path)
    *histograms, scalars = recorder.recorder.writers[0].seen
    assert histograms == [("histogram", 4, f"rows/{part}") for part in PARTS]
    assert scalars == ("scalars", 4, sorted(tag for tag in {*line} - {"step"} if not tiny.is_aside(tag)))
    assert not list(tmp_path.glob("events.*"))


@pytest.mark.parametrize("names", [("tensorboard", "tensorboard"), ("wandb",)])
def test_writers_that_are_not_there_are_refused_by_field(names):
    with pytest.raises(ConfigError, match=r"^log\.writers = "):
        writers_of(names)
