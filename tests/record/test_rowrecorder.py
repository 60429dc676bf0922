"""The recorder in somebody else's loop."""

import json
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from tests import tiny
from tied_lm import RowRecorder, RowStats, UseStats, open_run
from tied_lm.bands import UNSEEN, describe
from tied_lm.cli import instrument
from tied_lm.record import rowrecorder as recorder
from tied_lm.record.histogram import log_histogram
from tied_lm.record.runrecorder import ROWS

V = 6
COUNTS = np.array([10, 40, 0, 20, 30, 0])
PARTS = ("lookup", "scoring", "other", "total")


def use_stats(step, v=V):
    norms = {part: np.arange(v, dtype=np.float32) * (k + 1) + step for k, part in enumerate(PARTS)}
    return UseStats(**norms, cosine=np.full(v, 0.5))


def row_stats(step):
    norms = {part: np.arange(V, dtype=np.float32) * (k + 1) + step for k, part in enumerate(RowStats._fields[:5])}
    return RowStats(**norms, cosine=np.full(V, 0.5), input_count=np.arange(V), target_count=np.arange(V))


def steps_of(place):
    """The steps in each of the three places."""
    lines = [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]
    shown = [
        event.step for event in tiny.board_events(place) if any(v.tag == "split/share" for v in event.summary.value)
    ]
    return lines, tiny.dataset(place / "rows.zarr")["step"].tolist(), sorted(shown)


def record(place, steps, **kwargs):
    with RowRecorder(place, V, counts=COUNTS, **kwargs) as opened:
        for step in steps:
            opened.record(step, use_stats(step))


def test_a_record_lands_everywhere(tmp_path):
    with RowRecorder(tmp_path / "a" / "b", V, list("abcd`|"), COUNTS, tokens=(5,)) as opened:
        opened.record(3, use_stats(0), {"loss/train": np.float32(1.5)})
    run = open_run(tmp_path / "a" / "b")
    assert run.scalars("loss/train") == {3: 1.5}
    assert run.scalars("grad_norm/other")[3] == pytest.approx(3 * np.sqrt(55))
    assert run.scalars("split/share")[3] == pytest.approx(1 / 5)
    assert run.scalars("split/cosine")[3] == pytest.approx(0.5)
    assert run.scalars("band/unseen/lookup")[3] == pytest.approx(np.hypot(2, 5))
    assert run.scalars("rows_zero/total") == {3: pytest.approx(1 / V)}
    assert run.scalars("token/frequent_1/scoring") == {3: 2}
    assert run.scalars("token/named_5/other") == {3: 15}
    with run.rows as rows:
        assert set(rows.data_vars) == {*UseStats._fields, "frequency", "band"}
        np.testing.assert_array_equal(rows.other, [np.arange(V) * 3])
        np.testing.assert_array_equal(rows.frequency, COUNTS / 100)
        assert rows.band.values.tolist() == [4, 0, UNSEEN, 3, 2, UNSEEN]
        assert rows.cosine.attrs == {"units": "1"}
    shown = tiny.board_values(tmp_path / "a" / "b")
    undefined = {"band/4/share", "band/4/cosine"}  # of row 0, where all is 0
    assert {tag for tag, step in shown if step == 3} == run.tags() - undefined | {f"rows/{part}" for part in PARTS}
    assert all(np.isnan(run.scalars(tag)[3]) for tag in undefined)
    assert {tag for tag, step in shown if step == 0} == {"tokens/text_summary", "custom_scalars__config__"}
    assert b"| named_5 | 5 | &#124; |" in shown["tokens/text_summary", 0]
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        _ = run.config


def test_tokens_are_shown_harmlessly(tmp_path):
    tokens = ["<b>|x|</b>\n", "\t", " the", "\x1b[2J", "\x00", "__a__"]
    record(tmp_path, [0], token_strings=tokens, tokens=[0])
    shown = ["<b>|x|</b><0x0A>", "<0x09>", "␣the", "<0x1B>[2J", "<0x00>", "__a__"]
    with open_run(tmp_path).rows as rows:
        assert rows.token_string.values.tolist() == shown
        assert rows.lookup.swap_dims(token="token_string").sel(token_string="␣the", step=0) == 2
    (path,) = tmp_path.glob("events.*")
    cell = "&#60;b&#62;&#124;x&#124;&#60;&#47;b&#62;&#60;0x0A&#62;"
    assert f"| named_0 | 0 | {cell} |" in path.read_bytes().decode("latin1")


def test_the_histograms_are_those_of_the_norms(tmp_path):
    record(tmp_path, [0])
    values = {value.tag: value for event in tiny.board_events(tmp_path) for value in event.summary.value}
    assert list(values["rows/scoring"].histo.bucket) == np.asarray(log_histogram(use_stats(0).scoring)).tolist()


def test_statistics_of_this_projects_own_models(tmp_path):
    with RowRecorder(tmp_path, V) as opened:
        opened.record(0, row_stats(1))
        with pytest.raises(ValueError, match="records before had other fields"):
            opened.record(1, use_stats(1))
    run = open_run(tmp_path)
    assert {f"grad_norm/{part}" for part in RowStats._fields[:5]} < run.tags()
    assert run.last()["split/share"] == describe(row_stats(1))["share"]
    # Nothing is known of the frequencies.
    assert not any(tag.startswith(("band/", "token/")) for tag in run.tags())
    with run.rows as rows:
        assert set(rows.data_vars) == set(RowStats._fields)


def test_two_matrices_have_no_total(tmp_path):
    record(tmp_path, [0], tied=False)
    run = open_run(tmp_path)
    for tag in run.tags():
        assert tag.rsplit("/", 1)[-1] not in ("total", "share", "cosine") or tag.startswith("hypothetical/"), tag
    with run.rows as rows:
        assert "hypothetical" in rows.total.attrs


def test_a_folder_is_continued_after_its_last_step(tmp_path):
    record(tmp_path, [0, 4])
    with RowRecorder(tmp_path, V, counts=COUNTS) as opened:
        for step in (3, 4):
            with pytest.raises(ValueError, match=rf"step {step} comes too late.*up to step 4"):
                opened.record(step, use_stats(0))
        opened.record(5, use_stats(5))
        with pytest.raises(ValueError, match="step 5 comes too late"):
            opened.record(5, use_stats(5))
    assert steps_of(tmp_path) == ([0, 4, 5],) * 3
    assert ("tokens/text_summary", 0) in tiny.board_values(tmp_path)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_folder_is_written_again_from_a_step_on(tmp_path, first):
    record(tmp_path, [1, 2, 3])
    record(tmp_path, [3, 6], first_step=first)
    assert steps_of(tmp_path) == ([step for step in (1, 2) if step < first] + [3, 6],) * 3
    assert ("tokens/text_summary", 0) in tiny.board_values(tmp_path)


def test_what_was_not_flushed_is_as_if_it_had_not_been(tmp_path):
    opened = RowRecorder(tmp_path, V, counts=COUNTS)
    opened.record(0, use_stats(0))
    opened.flush()
    opened.record(1, use_stats(1))
    opened.recorder.arrays[ROWS].flush()  # the rows are there and the metrics are not
    opened.recorder.writers[0].close()
    opened.recorder.metrics.file.close()
    opened.lock.close()
    del opened
    record(tmp_path, [1, 2])
    assert steps_of(tmp_path) == ([0, 1, 2],) * 3


def test_a_record_can_soon_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 0)
    with RowRecorder(tmp_path, V) as opened:
        for step in range(3):
            opened.record(step, use_stats(step))
            assert steps_of(tmp_path) == (list(range(step + 1)),) * 3


def test_files_of_others_are_left_alone(tmp_path):
    writer = EventsWriter(str(tmp_path / "events"), filename_suffix=".12345678")
    for step in range(9):
        writer.write_event(Event(step=step, wall_time=1.0, summary=summary.scalar("theirs", step)))
    writer.close()
    (theirs,) = tmp_path.iterdir()
    before = theirs.read_bytes()
    record(tmp_path, [0, 1])
    record(tmp_path, [1, 2], first_step=1)
    assert theirs.read_bytes() == before


def test_nothing_is_written_of_a_record_that_is_refused(tmp_path):
    with RowRecorder(tmp_path, V, counts=COUNTS) as opened:
        opened.record(0, use_stats(0))
        for bad in (np.nan, np.inf):
            with pytest.raises(ValueError, match="other is not finite at step 1"):
                opened.record(1, use_stats(1)._replace(other=np.full(V, bad)))
        with pytest.raises(ValueError, match=re.escape("lookup has shape (5,), not (6,)")):
            opened.record(1, use_stats(1, v=5))
    assert steps_of(tmp_path) == ([0],) * 3
    with pytest.raises(ValueError, match="is closed"):
        opened.record(2, use_stats(2))
    opened.close()


REFUSED = {
    "step = 0.5 is not possible; allowed: an integer from 0 to 2**63 - 1": (0.5, None),
    "step = 9223372036854775808 is not possible": (2**63, None),
    "step = True is not possible": (True, None),
    "step = -1 is not possible": (-1, None),
    "step = '7' is not possible": ("7", None),
    "the tag 'step' is one that the recorder itself writes": (7, {"step": 1}),
    "the tag 'split/share' is one": (7, {"split/share": 1}),
    "the tag 'band/unseen/other' is one": (7, {"band/unseen/other": 1}),
    "the tag 'token/rare_0/total' is one": (7, {"token/rare_0/total": 1}),
    "the tag 'rows_zero/lookup' is one": (7, {"rows_zero/lookup": 1}),
    "the tag 'rows/lookup' is one": (7, {"rows/lookup": 1}),
    "3 is no tag: a text of printable characters": (7, {"a": 1, 3: 2}),
    "'' is no tag": (7, {"": 1}),
    "'a\\x1bb' is no tag": (7, {"a\x1bb": 1}),
    "'\\ud800' is no tag": (7, {"\ud800": 1}),
    "loss = array([1., 1.]) is not one number": (7, {"loss": np.ones(2)}),
    "loss = array([1.]) is not one number": (7, {"loss": np.ones(1)}),
    "loss = [1] is not one number": (7, {"loss": [1]}),
    "loss = '1.5' is not one number": (7, {"loss": "1.5"}),
    "loss = None is not one number": (7, {"loss": None}),
    "loss = True is not one number": (7, {"loss": True}),
    "loss = (1+2j) is not one number": (7, {"loss": 1 + 2j}),
    "loss = nan is not finite": (7, {"loss": float("nan")}),
    "loss = inf is not finite": (7, {"loss": float("inf")}),
    "loss = 1e+39 is not finite": (7, {"loss": 1e39}),
    "scalars are a list": (7, [1.0]),
}


def files_of(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.untyped
def test_a_refused_record_leaves_no_trace(tmp_path, monkeypatch, first):
    """In no file, whether it would have been the first record or not, and the same step can be written after it."""
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 0)
    with RowRecorder(tmp_path, V, counts=COUNTS) as opened:
        if not first:
            opened.record(3, use_stats(3), {"loss": 1.0})
        before = files_of(tmp_path)
        for words, (step, scalars) in REFUSED.items():
            with pytest.raises(ValueError, match="^" + re.escape(words)):
                opened.record(step, use_stats(7), scalars)
        for stats in (use_stats(7)._replace(cosine=["a"] * V), use_stats(7)._replace(lookup=np.full(V, 1e39)), (1, 2)):
            with pytest.raises(ValueError, match=r"cosine is of <U1|lookup is not finite|stats are a tuple"):
                opened.record(7, stats)
        opened.flush()
        assert files_of(tmp_path) == before
        opened.record(np.int64(7), use_stats(7), {"loss (train)": jnp.bfloat16(1.5), "n": 2, "d": jnp.float32(3)})
    assert steps_of(tmp_path) == ([7] if first else [3, 7],) * 3
    run = open_run(tmp_path)
    assert [run.scalars(tag)[7] for tag in ("loss (train)", "n", "d")] == [1.5, 2, 3]
    assert {tag for tag, step in tiny.board_values(tmp_path) if step == 7} == set(run.last()) - {"step"} | {
        f"rows/{part}" for part in PARTS
    }


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"counts": np.ones(5)}, "counts are not 6 numbers"),
        ({"counts": np.zeros(6)}, "counts are not 6 numbers"),
        ({"counts": np.array([1, -1, 1, 1, 1, 1])}, "counts are not 6 numbers"),
        ({"token_strings": ["a"]}, "token_strings has 1 entries, not one"),
        ({"token_strings": 5}, "token_strings = 5 is no list"),
        ({"token_strings": range(6)}, "token_strings are not all texts"),
        ({"tokens": 5}, "tokens = 5 is no list"),
        ({"tokens": (6,)}, r"tokens = \[6\] are not all in \[0, 6\)"),
        ({"tokens": ("a",)}, "tokens = 'a' is not possible; allowed: an integer from 0"),
        ({"counts": "abcdef"}, "counts are not 6 numbers"),
        ({"first_step": 1.5}, "first_step = 1.5 is not possible; allowed: an integer from 0"),
        ({"vocab_size": 0}, "vocab_size = 0 is not possible; allowed: an integer from 1"),
    ],
)
@pytest.mark.untyped
def test_arguments_that_do_not_fit(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        RowRecorder(tmp_path / "new", **({"vocab_size": V} | kwargs))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_the_folder_of_something_else_is_refused(tmp_path, name):
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(ValueError, match=f"holds a {name} that no RowRecorder wrote"):
        RowRecorder(tmp_path, V)


def test_a_cell_that_is_run_again_says_what_to_do(tmp_path, monkeypatch):
    opened = RowRecorder(tmp_path / "run", V)
    monkeypatch.chdir(tmp_path)
    for again in (tmp_path / "run", "run", tmp_path / "run" / ".." / "run"):
        with pytest.raises(ValueError, match=r"is open in another RowRecorder of this process: close\(\) that one"):
            RowRecorder(again, V)
    opened.close()
    opened = RowRecorder(tmp_path / "run", V)
    opened.record(0, use_stats(0))
    opened.close()
    del opened
    # One that nobody holds any more is in nobody's way.
    RowRecorder(tmp_path / "run", V)
    RowRecorder(tmp_path / "run", V).close()


def test_another_process_is_told_of(tmp_path):
    code = "import sys; from tied_lm import RowRecorder; r = RowRecorder(sys.argv[1], 6); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match="a folder that no other process is writing"):
            RowRecorder(tmp_path, V)
        other.communicate(b"\n")
    RowRecorder(tmp_path, V).close()


def test_a_size_that_no_statistics_have_costs_nothing(tmp_path):
    with RowRecorder(tmp_path, 10**15) as opened, pytest.raises(ValueError, match="lookup has shape"):
        opened.record(0, use_stats(0))


def test_a_recorder_prints_itself(tmp_path):
    opened = RowRecorder(tmp_path, V)
    opened.record(4, use_stats(4))
    assert repr(opened) == f"RowRecorder({str(tmp_path)!r}, 6 rows, next step 5)"
    opened.close()
    assert repr(opened) == f"RowRecorder({str(tmp_path)!r}, 6 rows, closed)"


def test_rows_of_another_vocabulary_or_other_counts_are_not_continued(tmp_path):
    record(tmp_path, [0])
    with RowRecorder(tmp_path, 7) as opened, pytest.raises(ValueError, match="of 6 rows, not"):
        opened.record(1, use_stats(1, v=7))
    for counts in (None, COUNTS + 1):
        with RowRecorder(tmp_path, V, counts=counts) as opened, pytest.raises(ValueError, match="of other counts"):
            opened.record(1, use_stats(1))
    assert steps_of(tmp_path) == ([0],) * 3


@pytest.mark.slow
def test_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(instrument, "STEPS", 21)
    instrument.train(str(tmp_path))
    assert str(tmp_path) in capsys.readouterr().out
    run = open_run(tmp_path)
    losses = run.scalars("loss/train")
    assert list(losses) == [0, 10, 20]
    assert losses[20] < losses[0]
    with run.rows as rows:
        assert dict(rows.sizes) == {"step": 3, "token": instrument.VOCABULARY}
        assert np.all(rows.scoring > 0)
        assert not rows.other.any()
