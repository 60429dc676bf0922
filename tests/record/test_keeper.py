"""Who writes a folder, and when what was recorded is on the disk."""

import errno
import gc
import os
import subprocess
import sys
import time

import pytest

from tests import tiny
from tests.record.test_rowrecorder import COUNTS, V, record, steps_of, use_stats
from tied_lm import RowRecorder, open_run
from tied_lm.record import keeper
from tied_lm.record.scalars import Metrics


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_record_is_soon_on_the_disk_without_a_further_call(tmp_path, monkeypatch):
    assert 2 * keeper.SOON <= 8  # of the ten seconds that are promised
    monkeypatch.setattr(keeper, "SOON", 0.1)
    with RowRecorder(tmp_path, V) as opened:
        for step in range(3):  # the first after a rest, the others at once after another
            opened.record(step, use_stats(step))
        wait_for(lambda: (tmp_path / "manifest.json").exists() and len(open_run(tmp_path).scalars("split/share")) == 3)
        opened.record(3, use_stats(3))
        wait_for(lambda: steps_of(tmp_path) == ([0, 1, 2, 3],) * 3)
        assert repr(opened).endswith("next step 4)")


def test_one_that_nobody_holds_any_more_writes_and_frees_its_folder(tmp_path, monkeypatch):
    RowRecorder(tmp_path / "again", V, counts=COUNTS).record(0, use_stats(0))
    gc.collect()
    record(tmp_path / "again", [1])  # at once
    assert steps_of(tmp_path / "again")[:2] == ([0, 1],) * 2
    monkeypatch.setattr(keeper, "SOON", 0.05)
    RowRecorder(tmp_path, V, counts=COUNTS).record(0, use_stats(0))
    gc.collect()
    wait_for(lambda: tmp_path not in keeper._open_here)
    assert steps_of(tmp_path) == ([0],) * 3


EXIT = """
import os, sys
import numpy as np
from tied_lm import RowRecorder, UseStats

def train(place):
    RowRecorder(place, 6).record(3, UseStats(*np.ones((5, 6))), {"loss": 1.5})

train("local")
kept = RowRecorder("kept", 6)
kept.record(4, UseStats(*np.ones((5, 6))), {"loss": 2.5})
if os.fork() == 0:
    try:
        kept.record(5, UseStats(*np.ones((5, 6))))
    except ValueError as error:
        print(error)
        sys.exit()
os.wait()
raise RuntimeError("the training failed")
"""


def test_what_was_recorded_is_on_the_disk_when_the_process_ends(tmp_path):
    """Whether or not the recorder is held until then; a child that was forked ends before, and writes nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", EXIT]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr.endswith("RuntimeError: the training failed\n"), ended.stderr
    assert ended.stdout == f"the recorder of {tmp_path / 'kept'} is closed\n"
    assert open_run(tmp_path / "local").scalars("loss") == {3: 1.5}
    assert open_run(tmp_path / "kept").scalars("loss") == {4: 2.5}
    assert tiny.dataset(tmp_path / "kept" / "rows.zarr")["step"].tolist() == [4]


def test_a_full_disk_is_told_by_the_next_call_and_what_was_flushed_before_stays(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    opened = RowRecorder(tmp_path, V, counts=COUNTS)
    opened.record(0, use_stats(0))
    opened.flush()
    with monkeypatch.context() as patched:
        patched.setattr(Metrics, "flush", full)
        opened.record(1, use_stats(1))
        with pytest.raises(OSError, match="No space left"):
            opened.flush()
    for call in (opened.flush, lambda: opened.record(2, use_stats(2)), opened.close):  # though there is space by now
        with pytest.raises(OSError, match="No space left"):
            call()
    record(tmp_path, [1, 2])
    assert steps_of(tmp_path) == ([0, 1, 2],) * 3


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
