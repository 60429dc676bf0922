"""Reading runs back."""

import json
import shutil
import threading

import numpy as np
import pytest
import xarray as xr

from tests import tiny
from tied_lm import RowStats, open_run
from tied_lm.config import to_dict
from tied_lm.files import Damaged
from tied_lm.record.reader import Shelf
from tied_lm.train import loop
from tied_lm.train.build import build_stream
from tied_lm.train.loop import train_run


@pytest.fixture(scope="module")
def config():
    return tiny.make_config("log.tokens=3,5")


@pytest.fixture(scope="module")
def place(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tied" / "seed0"
    tiny.train(folder, config)
    return folder


def test_the_config_comes_back(place, config):
    assert open_run(place).config == config
    assert open_run(str(place)).config == config


def test_scalars_by_step(place):
    run = open_run(place)
    losses = run.scalars("loss/eval")
    assert list(losses) == tiny.EVALUATION_STEPS
    assert list(run.scalars("loss/train")) == tiny.SCALAR_STEPS[1:]
    assert losses[0] == pytest.approx(np.log(20), abs=0.05)
    assert losses[39] < losses[0]
    assert run.last()["loss/eval"] == losses[39]
    assert run.last()["step"] == 39
    assert "loss/eval" in run.tags()
    assert "step" not in run.tags()


def test_an_unknown_tag_lists_those_there_are(place):
    with pytest.raises(
        KeyError,
        match=r"'loss/evil' is not among .*; did you mean 'loss/eval'\? .*loss/eval.*split/share",
    ):
        open_run(place).scalars("loss/evil")


def test_what_is_on_the_shelf_is_read_once(place, tmp_path):
    copy, shelf = shutil.copytree(place, tmp_path / "run"), Shelf(2**20)
    expected = open_run(place).probe.load()
    with open_run(copy, shelf).probe as probe:
        xr.testing.assert_identical(probe, expected)
    for name in ("probe.zarr", "rows.zarr"):
        for chunk in (copy / name / "lookup" / "c").rglob("*"):
            chunk.unlink() if chunk.is_file() else None
    xr.testing.assert_identical(open_run(copy, shelf).probe, expected)
    with pytest.raises(Damaged, match=r"probe\.zarr is damaged"):
        open_run(copy).probe.close()
    with pytest.raises(Damaged, match=r"rows\.zarr is damaged"):
        open_run(copy, shelf).rows.close()
    full = Shelf(expected.nbytes - 1)
    open_run(place, full).probe.close()
    assert not full.logs


def test_rows_over_step_and_token(place):
    with open_run(place).rows as rows, open_run(place).probe as probe:
        assert dict(rows.sizes) == {"step": len(tiny.ROW_STEPS), "token": 20}
        np.testing.assert_array_equal(rows.step, tiny.ROW_STEPS)
        np.testing.assert_array_equal(probe.step, tiny.PROBE_STEPS)
        for name in (*RowStats._fields, "update"):
            assert rows[name].dims == ("step", "token")
            assert rows[name].dtype == np.float32
        assert rows.lookup.sel(step=16, token=3).shape == ()
        np.testing.assert_array_equal(rows.input_count.sum("token"), [10.0] * len(tiny.ROW_STEPS))
        np.testing.assert_array_equal(probe.target_count.sum("token"), [17.0] * len(tiny.PROBE_STEPS))


@pytest.mark.parametrize("name", ["rows", "probe", "heldout"])
def test_a_log_that_is_gone_is_no_run_without_data(place, tmp_path, name):
    shutil.copytree(place, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / f"{name}.zarr")
    with pytest.raises(Damaged, match=rf"run/{name}\.zarr.* is damaged"):
        getattr(open_run(tmp_path / "run"), name)


def test_a_running_run_can_be_read(tmp_path, config, monkeypatch):
    """At every moment a reader sees whole records, from none to all."""
    monkeypatch.setattr(loop, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0.0)
    seen = []

    def look(_):
        run = open_run(tmp_path / "run")
        assert run.config == config
        try:
            rows = run.rows
        except FileNotFoundError:
            seen.append((0, 0))
            return
        with rows:
            steps = rows.step.values
            assert steps.tolist() == tiny.ROW_STEPS[: steps.size]
            assert np.all(rows.scoring.values > 0)
        try:
            seen.append((steps.size, len(run.tags())))
            assert run.scalars("loss/eval")[0] > 0
        except FileNotFoundError:  # the metrics come last
            seen.append((steps.size, 0))

    train_run(tiny.trainer_of(config), config, build_stream(config), tmp_path / "run", threading.Event(), look)
    assert seen[0] == (0, 0)
    # All that precedes a checkpoint is there after it.
    assert {size for size, _ in seen} >= {5, 6, 7, 8}
    assert seen == sorted(seen)


NO_DATA = {
    "last": lambda run: run.last(),
    "tags": lambda run: run.tags(),
    "scalars": lambda run: run.scalars("loss/eval"),
    "rows": lambda run: run.rows,
    "probe": lambda run: run.probe,
}


@pytest.mark.parametrize("read", NO_DATA)
@pytest.mark.parametrize("begun", [False, True])
def test_a_run_without_data_yet_says_so_in_one_sentence(place, config, tmp_path, monkeypatch, read, begun):
    run_folder = tmp_path / "run"
    if begun:  # its files are there, and nothing is in them
        with monkeypatch.context() as patched:
            patched.setattr(loop._Loop, "_run", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tiny.train(run_folder, config)
    else:
        run_folder.mkdir()
        shutil.copy(place / "config.json", run_folder)
    run = open_run(run_folder)
    assert run.config == config
    assert repr(run) == f"Run({str(run_folder)!r}, no data yet)"
    with pytest.raises(FileNotFoundError, match=rf"^{run_folder}\S* has no data yet: [^\n]+$"):
        NO_DATA[read](run)


def test_a_run_prints_itself(place):
    assert repr(open_run(place)) == f"Run({str(place)!r}, step 39)"


def test_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no run: it has neither config\.json nor metrics\.jsonl$"):
        open_run(tmp_path)


def test_a_comparison_is_no_run(place):
    """Neither is a sweep, which is a folder of comparisons."""
    comparison = place.parent.parent
    with pytest.raises(FileNotFoundError, match=rf"^{comparison} is no run: .*; a run in it is {place}$"):
        open_run(comparison)
    (comparison / "config.json").write_text('{"seed": 0, "compare": {"seeds": 1}}')
    with pytest.raises(
        FileNotFoundError,
        match=rf"^{comparison} is a comparison, not a run: open_comp.*; a run in it is {place}$",
    ):
        open_run(comparison)
    (comparison / "config.json").unlink()


def test_a_run_that_would_not_be_started_today_is_read(tmp_path):
    values = to_dict(tiny.make_config())
    values["model"]["tying"] = "pseudo_inverse"
    values["optimizer"] |= {"schedule": "wsd", "warmup_steps": 90, "decay_steps": 0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = open_run(tmp_path).config
    assert (config.model.tying, config.optimizer.schedule, config.optimizer.warmup_steps) == (
        "pseudo_inverse",
        "wsd",
        90,
    )
