"""The recorder in somebody else's loop."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from tests import tiny
from tied_lm import (
    RowRecorder,
    RowStats,
    TiedEmbedding,
    UseStats,
    embed_loss_and_gradients,
    loss_and_gradients,
    open_run,
    row_stats,
)
from tied_lm.bands import UNSEEN, describe
from tied_lm.cli import instrument
from tied_lm.record.histogram import log_histogram
from tied_lm.record.reader import open_log
from tied_lm.record.runrecorder import ROWS

V = 6
COUNTS = np.array([10, 40, 0, 20, 30, 0])
PARTS = ("lookup", "scoring", "other", "total")


def use_stats(step, v=V):
    norms = {part: np.arange(v, dtype=np.float32) * (k + 1) + step for k, part in enumerate(PARTS)}
    return UseStats(**norms, cosine=np.full(v, 0.5))


def own_stats(step):
    norms = {part: np.arange(V, dtype=np.float32) * (k + 1) + step for k, part in enumerate(RowStats._fields[:5])}
    return RowStats(**norms, cosine=np.full(V, 0.5), input_count=np.arange(V), target_count=np.arange(V))


def steps_of(place):
    """The steps in each of the three places."""
    lines = [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]
    shown = [
        event.step
        for event in tiny.board_events(place)
        if any(v.tag == "single_batch/split/share" for v in event.summary.value)
    ]
    with open_log(place, "rows.zarr") as rows:
        return lines, rows["step"].values.tolist(), sorted(shown)


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
    strings = {"frequent_1": "b", "middle_3": "d", "rare_0": "a", "named_5": "|"}
    curves = {tiny.board_tag(tag, strings) for tag in run.tags() - undefined}
    assert {tag for tag, step in shown if step == 3} == curves | {f"rows/{part}" for part in PARTS}
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
        opened.record(0, own_stats(1))
        with pytest.raises(ValueError, match="records before had other fields"):
            opened.record(1, use_stats(1))
    run = open_run(tmp_path)
    assert {f"grad_norm/{part}" for part in RowStats._fields[:5]} < run.tags()
    assert run.last()["split/share"] == describe(own_stats(1))["share"]
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
    with RowRecorder(tmp_path / "killed", V, counts=COUNTS) as opened:
        opened.record(0, use_stats(0))
        opened.flush()
        opened.record(1, use_stats(1))
        opened.keeper.background.wait()
        opened.keeper.recorder.arrays[ROWS].flush()  # the rows are there and the metrics are not
        shutil.copytree(tmp_path / "killed", tmp_path / "left")
    record(tmp_path / "left", [1, 2])
    assert steps_of(tmp_path / "left") == ([0, 1, 2],) * 3


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


def test_steps_and_scalars_of_every_kind(tmp_path):
    steps = [0, np.int32(1), np.uint8(2), np.array(3), jnp.int32(4), jnp.uint8(5)]
    ones = [np.ones(1), np.ones((1, 1), np.float16), np.array(1), jnp.ones(1), jnp.ones((1, 1), jnp.int32), 1]
    with RowRecorder(tmp_path, V, counts=COUNTS) as opened:
        for step, one in zip(steps, ones, strict=True):
            opened.record(step, use_stats(int(step)), {"one": one})
    assert steps_of(tmp_path) == ([0, 1, 2, 3, 4, 5],) * 3
    assert open_run(tmp_path).scalars("one") == dict.fromkeys(range(6), 1)


def test_what_was_recorded_does_not_change_any_more(tmp_path):
    """A loop may use the arrays that it handed over for the next step."""
    stats = use_stats(1)
    with RowRecorder(tmp_path, V, counts=COUNTS) as opened:
        opened.record(0, stats)
        stats.lookup[:] = -1
    with open_run(tmp_path).rows as rows:
        np.testing.assert_array_equal(rows.lookup, [use_stats(1).lookup])


@pytest.mark.untyped  # whose wrappers would be told as the place of the warning
def test_what_is_not_finite_is_recorded_as_it_is_with_one_warning(tmp_path):
    lookup = np.array([1, np.nan, np.inf, 2, 3, 4], np.float32)
    total = np.array([1e39, 1, 1, 1, 1, 1])  # infinity in float32
    bad = use_stats(1)._replace(lookup=lookup, total=total, cosine=np.array([0.5, 0.5, np.nan, 0, 0, 0]))
    with RowRecorder(tmp_path, V, counts=COUNTS) as opened:
        opened.record(0, use_stats(0))
        words = r"^at step 1, lookup, total, cosine, down = -inf, loss = nan, .* \(3 of 6 rows\); it is recorded"
        with pytest.warns(UserWarning, match=words) as warned:
            opened.record(1, bad, {"loss": jnp.nan, "up": np.inf, "down": -np.inf, "perplexity": 1e39})
        assert (len(warned), warned[0].filename) == (1, __file__)
        opened.record(2, bad)
        opened.record(3, use_stats(3))
    assert steps_of(tmp_path)[:2] == ([0, 1, 2, 3],) * 2
    run = open_run(tmp_path)
    assert run.scalars("rows_nonfinite") == {0: 0, 1: 3, 2: 3, 3: 0}
    assert [run.scalars(tag)[1] for tag in ("up", "down", "perplexity")] == [np.inf, -np.inf, 1e39]
    assert np.isnan([run.scalars(tag)[1] for tag in ("loss", "grad_norm/lookup", "split/share")]).all()
    assert run.scalars("band/unseen/lookup")[1] == np.inf
    assert run.scalars("grad_norm/other")[1] == pytest.approx(np.linalg.norm(use_stats(1).other))
    with run.rows as rows:
        np.testing.assert_array_equal(rows.lookup[1], lookup)
        np.testing.assert_array_equal(rows.total[1], [np.inf, 1, 1, 1, 1, 1])
    # Nothing in it is beyond the JSON of other languages.
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    shown = {tag for tag, step in tiny.board_values(tmp_path) if step == 1}
    assert {"up", "down", "perplexity", "single_batch/band/unseen/lookup"} < shown
    assert not {"loss", "single_batch/grad_norm/lookup"} & shown


def test_what_the_split_of_a_model_gives(tmp_path):
    """Of this project's own models and of others, from a jitted step."""
    model, ids, targets = TiedEmbedding(V, 2), jnp.array([[0, 2, 4]]), jnp.array([[2, 4, 0]])
    params = model.init(jax.random.key(0), ids)["params"]
    step = jax.jit(lambda params: loss_and_gradients(model, params, ids, targets, rows=True))
    loss, _, stats = step(params)
    with RowRecorder(tmp_path / "own", V, counts=COUNTS) as opened:
        opened.record(0, stats, {"loss": loss})
    run = open_run(tmp_path / "own")
    expected = jax.jit(lambda params: row_stats(model, params, ids, targets))(params).marked()
    with run.rows as rows:
        for name, field in expected._asdict().items():
            np.testing.assert_allclose(rows[name], [field], rtol=1e-5, atol=1e-7)
    for name, value in describe(expected).items():
        tag = f"split/{name}" if name in ("share", "cosine") else f"grad_norm/{name}"
        assert run.scalars(tag) == {0: pytest.approx(value, rel=1e-5)}
    _, _, uses = jax.jit(
        lambda table: embed_loss_and_gradients(
            lambda p: jax.nn.logsumexp(p["table"][ids[0]] @ p["table"].T), {"table": table}, table="table"
        )
    )(params["embedding"])
    with RowRecorder(tmp_path / "other", V) as opened:
        opened.record(0, uses)
    with open_run(tmp_path / "other").rows as rows:
        np.testing.assert_array_equal(rows.scoring, [uses.scoring])


@pytest.mark.parametrize("given", ["run", "new/../run", "~/run"])
def test_a_folder_is_absolute_at_once(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with RowRecorder(given, V, counts=COUNTS) as opened:
        monkeypatch.chdir("/")
        opened.record(0, use_stats(0))
        assert opened.folder == tmp_path / "run"
    assert steps_of(tmp_path / "run") == ([0],) * 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_recorder_prints_itself(tmp_path):
    opened = RowRecorder(tmp_path, V)
    opened.record(4, use_stats(4))
    assert repr(opened) == f"RowRecorder({str(tmp_path)!r}, 6 rows, next step 5)"
    opened.close()
    assert repr(opened) == f"RowRecorder({str(tmp_path)!r}, 6 rows, closed)"


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
