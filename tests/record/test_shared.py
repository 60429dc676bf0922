"""What is the same in several logs is one file, and each log stands alone."""

import os
import shutil

import numpy as np
import pytest
import xarray as xr

from tied_lm.files import Damaged
from tied_lm.record.history import RowLog, verify
from tied_lm.record.shared import share

V = 7
NAMES = ["zarr.json", "c/0"]


def make(folder, strings="abcdefg", first_step=0):
    constants = {"frequency": np.linspace(0.0, 1.0, V), "band": np.arange(V) % 3}
    log = RowLog(folder, {"a": {}}, constants, first_step, list(strings))
    log.cut()
    for step in range(first_step, 40):
        log.append(step, {"a": np.full(V, step, np.float32)})
    log.flush()
    return log


@pytest.fixture
def runs(tmp_path):
    """Two runs, and the logs of both."""
    found = [tmp_path / name for name in ("one", "two")]
    return found, [run / f"{name}.zarr" for run in found for name in ("rows", "probe")]


def inodes(logs, name):
    return [(log / name).stat().st_ino for log in logs]


def test_constants_are_one_file_and_each_log_is_whole_whatever_becomes_of_the_others(runs, tmp_path):
    folders, logs = runs
    entries = [make(log).entry() for log in logs]
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    share(folders)
    share(folders)
    for array in ("token", "frequency", "band"):
        for name in NAMES:
            assert len({*inodes(logs, f"{array}/{name}")}) == 1
    for name in ("a/zarr.json", "a/c/0/0", "step/c/0", "zarr.json"):
        assert len({*inodes(logs, name)}) == len(logs)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == files

    first = (logs[0] / "token/zarr.json").read_bytes()
    make(logs[1], first_step=20)  # goes on after a stop
    make(logs[2], "tuvwxyz")  # is made anew, of other tokens
    assert (logs[0] / "token/zarr.json").read_bytes() == first
    shutil.rmtree(logs[0])
    os.rename(logs[3], tmp_path / "moved.zarr")
    for log, entry in ((logs[1], entries[1]), (tmp_path / "moved.zarr", entries[3])):
        verify(log, entry)
        with xr.open_zarr(log) as rows:
            assert rows.token.strings == list("abcdefg")
            np.testing.assert_array_equal(rows.frequency, np.linspace(0.0, 1.0, V))
            np.testing.assert_array_equal(rows.a[:, 3], range(40))


def test_what_differs_is_left_alone_and_damage_does_not_spread(runs):
    folders, logs = runs
    entries = [make(log, "abcdefg" if i else "tuvwxyz").entry() for i, log in enumerate(logs)]
    cut, longer = logs[1] / "frequency/c/0", logs[1] / "band/zarr.json"
    cut.write_bytes(cut.read_bytes()[:-9])
    longer.write_bytes(longer.read_bytes() + b" ")
    share(folders)
    assert len({*inodes(logs, "token/zarr.json")}) == 2
    assert len({*inodes(logs, "token/c/0")}) == 1
    for name in ("frequency/c/0", "band/zarr.json"):
        assert inodes(logs, name)[0] == inodes(logs, name)[2] == inodes(logs, name)[3] != inodes(logs, name)[1]
    for i in (0, 2, 3):
        verify(logs[i], entries[i])
    with pytest.raises(Damaged, match=r"one/probe\.zarr is damaged"):
        verify(logs[1], entries[1])


def test_where_the_file_system_has_no_links_each_log_keeps_its_own(runs, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    folders, logs = runs
    entries = [make(log).entry() for log in logs]
    monkeypatch.setattr(os, "link", refuse)
    share(folders)
    assert len({*inodes(logs, "token/zarr.json")}) == len(logs)
    for log, entry in zip(logs, entries, strict=True):
        verify(log, entry)
