"""Whole runs in their folders: what they record, and that no stop changes it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests import tiny
from tied_lm import open_run, row_stats
from tied_lm.checks import ConfigError
from tied_lm.files import Damaged
from tied_lm.record.runrecorder import RunRecorder
from tied_lm.record.scalars import is_finished, read_metrics
from tied_lm.train import calendar, evaluation, loop
from tied_lm.train.build import build_model, build_stream
from tied_lm.train.loop import Interrupted

ROOT = Path(__file__).parents[2]
CONFIG = tiny.make_config()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    place = tmp_path_factory.mktemp("whole") / "run"
    tiny.train(place, CONFIG)
    return place


@pytest.fixture
def one_by_one(monkeypatch):
    """One update to a dispatch, so that a stop comes one step after it is asked for."""
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0.0)


def interrupt(place, updates, config=CONFIG, trainer=None):
    """Stop after so many updates, and tell where the run stands."""
    with pytest.raises(Interrupted) as raised:
        tiny.train(place, config, updates, trainer)
    step = int(str(raised.value).split()[2])
    assert str(raised.value) == f"stopped after {step} updates, all of them saved"
    return step


def checkpoint_steps(place):
    return sorted(int(path.name) for path in (place / "checkpoints").iterdir())


def test_exactly_the_updates_of_the_config(whole):
    state = tiny.saved_state(whole, CONFIG)
    counts = [int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 0]
    assert int(state.step) == 39
    assert counts == [39] * len(counts)
    assert counts
    tiny.assert_same_bits(state.params, tiny.trajectory(CONFIG)[39].params)
    assert is_finished(whole, 39)


def test_the_training_loss_is_the_mean_since_its_last_record(whole):
    model, stream = build_model(CONFIG), build_stream(CONFIG)

    def loss(params, step):
        batch = stream.batch(step)
        logp = jax.nn.log_softmax(model.apply({"params": params}, batch.inputs))
        return -jax.numpy.take_along_axis(logp, batch.targets[..., None], axis=-1).mean()

    states = tiny.trajectory(CONFIG)
    losses = [float(jax.jit(loss)(states[k].params, np.int32(k))) for k in range(39)]
    recorded = open_run(whole).scalars("loss/train")
    assert list(recorded) == tiny.SCALAR_STEPS[1:]
    for before, step in zip(tiny.SCALAR_STEPS, tiny.SCALAR_STEPS[1:], strict=False):
        assert recorded[step] == pytest.approx(np.mean(losses[before:step]), rel=1e-6), step


@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_every_record_is_of_its_step(tmp_path, tying):
    config = tiny.make_config(f"model.tying={tying}")
    tiny.train(tmp_path / "run", config)
    rows = tiny.dataset(tmp_path / "run" / "rows.zarr")
    model, stream, states = build_model(config), build_stream(config), tiny.trajectory(config)
    stats_of = jax.jit(lambda params, step: row_stats(model, params, *stream.batch(step)[:2]))
    assert rows["step"].tolist() == tiny.ROW_STEPS
    for k, step in enumerate(tiny.ROW_STEPS):
        expected = stats_of(states[step].params, np.int32(step)).marked()
        for name, values in expected._asdict().items():
            np.testing.assert_allclose(rows[name][k], values, rtol=1e-4, atol=1e-6, err_msg=f"{name} at {step}")
        for name in model.vocabulary:
            field = "update" if tying == "tied" else f"update_{name}"
            if step == 39:  # no update follows
                assert np.isnan(rows[field][k]).all()
                continue
            change = states[step + 1].params[name].astype(np.float64) - states[step].params[name]
            assert np.abs(change).max() > 1e-3
            np.testing.assert_allclose(rows[field][k], np.linalg.norm(change, axis=-1), rtol=1e-4, atol=1e-6)


def test_held_out_scalars_are_those_of_their_step(whole):
    trainer, stream, states = tiny.trainer_of(CONFIG), build_stream(CONFIG), tiny.trajectory(CONFIG)
    run = open_run(whole)
    for step in tiny.EVALUATION_STEPS:
        result = evaluation.evaluate(trainer, states[step].params, stream, 23)
        assert run.scalars("loss/eval")[step] == pytest.approx(float(np.sum(result.nll)) / 23, rel=1e-6)
        assert run.scalars("loss/excess")[step] == pytest.approx(float(np.sum(result.excess)) / 23, rel=1e-4)
        with run.heldout as heldout:
            assert heldout.step.values.tolist() == tiny.EVALUATION_STEPS
            at = heldout.sel(step=step)
            # The programs that train pad and fuse otherwise than a single call.
            for b in range(5):
                np.testing.assert_allclose(at[f"nll_{b}"], result.nll[:, b], rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(at[f"tokens_{b}"], result.tokens[:, b])
            np.testing.assert_allclose(at.excess, result.excess, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(at.law, result.law, rtol=1e-6)
            assert at.cluster.values.tolist() == [0, 1, 2, 3, 4, 5]  # 23 tokens in sequences of 5, two to a batch
        band = result.nll.sum(axis=0)[0] / result.tokens.sum(axis=0)[0]
        assert run.scalars("band/0/loss")[step] == pytest.approx(float(band), rel=1e-5)
    with run.probe as probe:
        for step in tiny.PROBE_STEPS:
            expected = evaluation.probe(trainer, states[step].params, stream, 17)[0].stats.lookup
            np.testing.assert_allclose(probe.lookup.sel(step=step), expected, rtol=1e-5, atol=1e-8)


def test_progress_counts_every_update_once(tmp_path):
    done = []
    for runs in (1, 2):
        stop = threading.Event()
        loop.train_run(tiny.trainer_of(CONFIG), CONFIG, build_stream(CONFIG), tmp_path / "run", stop, done.append)
        assert sum(done) == 39 * runs


def test_the_dispatches_change_no_bit(whole, tmp_path, monkeypatch):
    for k, seconds in enumerate((0.0, 1e-3, 1e9)):
        monkeypatch.setattr(loop, "DISPATCH_SECONDS", seconds)
        monkeypatch.setattr(loop, "FLUSH_SECONDS", 0.0)
        tiny.train(tmp_path / str(k), CONFIG)
        tiny.assert_same_run(tmp_path / str(k), whole, CONFIG)


def test_what_is_recorded_changes_no_bit_of_the_parameters(whole, tmp_path):
    config = tiny.make_config("log.rows_every=1", "log.scalars_every=39", "checkpoint.every=39")
    tiny.train(tmp_path / "run", config)
    tiny.assert_same_bits(tiny.saved_state(tmp_path / "run", config).params, tiny.saved_state(whole, CONFIG).params)


def test_more_records_than_a_dispatch_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 1e9)
    config = tiny.make_config("log.rows_every=1")
    trainer = tiny.new_trainer(config)
    trainer.slots = 2
    tiny.train(tmp_path / "run", config, trainer=trainer)
    rows = tiny.dataset(tmp_path / "run" / "rows.zarr")
    assert rows["step"].tolist() == list(range(40))
    inputs = jax.jit(lambda stream, step: stream.batch(step).inputs)
    for step in range(40):
        ids = np.ravel(inputs(build_stream(config), np.int32(step)))
        np.testing.assert_array_equal(rows["input_count"][step], np.bincount(ids, minlength=20))


def test_scarce_text_is_used_as_far_as_it_goes(tmp_path):
    config = tiny.write_letters(tmp_path, "log.probe_tokens=50")
    interrupt(tmp_path / "run", 13, config)
    tiny.train(tmp_path / "run", config)
    run = open_run(tmp_path / "run")
    assert run.config == config
    assert "loss/excess" not in run.tags()
    assert run.scalars("loss/eval")[39] < run.scalars("loss/eval")[0]
    assert set(run.scalars("probe/tokens").values()) == {20.0}
    trainer, stream = tiny.trainer_of(config), build_stream(config)
    params = trainer.init(np.uint32(0)).params
    expected = evaluation.probe(trainer, params, stream.heldout_ahead(23), 20)[0].stats
    with run.probe as probe:
        np.testing.assert_array_equal(probe.scoring.sel(step=0), expected.scoring)
    # Letters of the held-out text lie in all bands, and ids that are no letters in none.
    assert {tag.split("/")[1] for tag in run.tags() if tag.startswith("band/")} == {"0", "1", "2", "3", "4", "unseen"}
    assert "band/unseen/loss" not in run.tags()
    (tmp_path / "letters.txt").write_bytes(tiny.LETTERS[::-1])
    with pytest.raises(ConfigError, match=r"text_heldout\.sha256: .*; text_train\.sha256: "):
        tiny.train(tmp_path / "run", config)


def test_a_finished_run_is_left_as_it_is(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    tiny.train(whole, CONFIG)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_going_on_in_a_new_trainer_after_a_third(whole, tmp_path):
    place = tmp_path / "run"
    step = interrupt(place, 13)
    assert 13 <= step < 39
    assert not is_finished(place, 39)
    tiny.train(place, CONFIG, trainer=tiny.new_trainer(CONFIG))
    tiny.assert_same_run(place, whole, CONFIG)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("updates", [0, 1, 4, 7, 12, 17, 35, 37])
def test_going_on_from_any_step(whole, tmp_path, updates):
    place = tmp_path / "run"
    stopped = interrupt(place, updates)
    assert stopped == (updates + 1 if updates else 0)
    if updates:
        assert checkpoint_steps(place)[-1] == stopped
        on_grid = stopped in tiny.EVALUATION_STEPS
        assert (place / "checkpoints" / str(stopped) / "metrics").exists() == on_grid
    assert all(line["step"] < max(stopped, 1) for line in read_metrics(place))
    tiny.train(place, CONFIG)
    tiny.assert_same_run(place, whole, CONFIG)


@pytest.mark.usefixtures("one_by_one")
def test_stopping_again_and_again(whole, tmp_path):
    place = tmp_path / "run"
    stops = [interrupt(place, updates) for updates in (0, 0, 3, 4, 4, 8, 9, 20, 37)]
    assert stops == [0, 0, 4, 4, 4, 9, 9, 21, 38]
    tiny.train(place, CONFIG)
    tiny.assert_same_run(place, whole, CONFIG)
    assert len(list(place.glob("events.out.tfevents.*"))) == 8  # those of the stops at 0 hold nothing that is kept
    shown, expected = tiny.accumulate(place), tiny.accumulate(whole)
    assert sorted(shown.Tags()["scalars"]) == sorted(expected.Tags()["scalars"])
    for tag in shown.Tags()["scalars"]:
        steps = [[e.step for e in board.Scalars(tag)] for board in (shown, expected)]
        # A process does not time the first call of a program.
        assert set(steps[0]) < set(steps[1]) if tag.startswith("time/ms") else sorted(steps[0]) == steps[1], tag
    for tag in shown.Tags()["histograms"]:
        assert sorted(e.step for e in shown.Histograms(tag)) == tiny.ROW_STEPS, tag


@pytest.mark.usefixtures("one_by_one")
def test_a_stop_at_the_last_step_finishes(whole, tmp_path):
    tiny.train(tmp_path / "run", CONFIG, stop_after=38)
    tiny.assert_same_run(tmp_path / "run", whole, CONFIG)


@pytest.mark.parametrize("left", [0, 30])
def test_the_final_record_is_made_up_for(whole, tmp_path, left):
    """The last checkpoint was saved, and the last line of the metrics not, or not whole."""
    place = tmp_path / "run"
    shutil.copytree(whole, place)
    path = place / "metrics.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + last[:left])
    (place / "manifest.json").unlink()  # as before the last flush, which did not come to replace it
    assert not is_finished(place, 39)
    tiny.train(place, CONFIG)
    tiny.assert_same_run(place, whole, CONFIG)


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [(RunRecorder, "write", 10), (ocp.CheckpointManager, "_finalize", 39)],
    ids=["record", "save"],
)
def test_an_error_of_another_thread_stops_the_run(whole, tmp_path, monkeypatch, owner, name, step):
    place, method = tmp_path / "run", getattr(owner, name)

    def fail(self, at, *rest):
        if at == step:
            raise OSError("no space left on device")
        return method(self, at, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(OSError, match="no space left on device"):
            tiny.train(place, CONFIG)
    assert all(line["step"] < step for line in read_metrics(place))
    tiny.train(place, CONFIG)
    tiny.assert_same_run(place, whole, CONFIG)


def test_torn_files_are_mended(whole, tmp_path):
    place = tmp_path / "run"
    interrupt(place, 13)
    (events,) = place.glob("events.out.tfevents.*")
    data = events.read_bytes()
    events.write_bytes(data + data[:33])
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "loss/tr')
    tiny.train(place, CONFIG)
    tiny.assert_same_run(place, whole, CONFIG)


def test_a_lost_checkpoint_costs_only_time(whole, tmp_path):
    """What lies past the older checkpoint is cut off and done again."""
    place = tmp_path / "run"
    shutil.copytree(whole, place)
    shutil.rmtree(place / "checkpoints" / "39")
    os.truncate(place / "metrics.jsonl", (place / "metrics.jsonl").stat().st_size - 5)
    (place / "manifest.json").unlink()
    tiny.train(place, CONFIG)
    tiny.assert_same_run(place, whole, CONFIG)


def test_a_damaged_checkpoint_stops_the_run_and_changes_nothing(whole, tmp_path):
    place = tmp_path / "run"
    step = interrupt(place, 13)
    for path in (place / "checkpoints" / str(step) / "state" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    before = [(place / name).read_bytes() for name in ("metrics.jsonl", "rows.zarr/zarr.json")]
    with pytest.raises(Damaged, match=rf"^the checkpoint {place}/checkpoints/{step} is damaged [^\n]*$"):
        tiny.train(place, CONFIG)
    assert [(place / name).read_bytes() for name in ("metrics.jsonl", "rows.zarr/zarr.json")] == before


@pytest.mark.slow
def test_of_many_rows_fewer_records_have_every_row(whole, tmp_path, monkeypatch, one_by_one):
    """All else is recorded as ever, and a stop changes nothing."""
    monkeypatch.setattr(calendar, "MOST_VALUES", 6 * CONFIG.data.vocab_size)
    kept = [0, 1, 2, 4, 32, 39]
    assert interrupt(tmp_path / "run", 20) < 32
    tiny.train(tmp_path / "run", CONFIG)
    assert tiny.metrics(tmp_path / "run") == tiny.metrics(whole)
    assert tiny.board_values(tmp_path / "run") == tiny.board_values(whole)
    with open_run(tmp_path / "run").rows as thin, open_run(whole).rows as all_:
        assert thin.identical(all_.sel(step=kept))


# Kill the process just before, or just after, the n-th call of a method.
KILL = """
import os, signal, sys
from pathlib import Path
from tests import tiny
from tied_lm.record.tensorboard import Board
from tied_lm.train.checkpoint import Checkpoints
from tied_lm.record.history import RowLog
from tied_lm.record.openblock import OpenBlock

place, owner, name, call, moment = sys.argv[1:]
owner, calls = vars()[owner], 0
method = getattr(owner, name)

def deadly(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(call) and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = method(*args, **kwargs)
    if calls == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, deadly)
tiny.train(Path(place), tiny.make_config())
"""


@pytest.mark.slow
def test_killed_in_the_middle_again_and_again(whole, tmp_path):
    place = tmp_path / "run"
    points = [
        ("Checkpoints", "save", "1", "after"),  # while the first checkpoint is being written
        ("OpenBlock", "add", "4", "after"),  # records on the disk, for which nothing vouches yet
        ("RowLog", "_publish", "2", "before"),  # while the logs are being cut
        ("Board", "flush", "1", "before"),  # rows on the disk, scalars not
        ("Board", "scalars", "9", "after"),  # in the middle of a dispatch
    ]
    for point in points:
        command = [sys.executable, "-c", KILL, str(place), *point]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not is_finished(place, 39)
        # A kill before the first checkpoint is whole leads back to step 0, and may leave no rows so far.
        with contextlib.suppress(FileNotFoundError), open_run(place).rows as rows:
            assert rows.step.values.tolist() == tiny.ROW_STEPS[: rows.sizes["step"]]
            assert np.all(rows.scoring.values > 0)
    tiny.train(place, CONFIG)
    tiny.assert_same_run(place, whole, CONFIG)
