"""Records that do not fill a chunk yet."""

import contextlib
import shutil
import sys

import numpy as np
import pytest
import xarray as xr

from tied_lm.files import Damaged
from tied_lm.record import history
from tied_lm.record.history import STEPS_IN_CHUNK
from tied_lm.record.reader import check_logs, open_log
from tied_lm.record.recorder import Log, Recorder

V, LOGS = 5, ("a.zarr", "b.zarr")
EVERY = 7  # calls; with 1 every one


def open_recorder(place, first_step=0):
    place.mkdir(exist_ok=True)
    return Recorder(place, first_step, {name: Log({"x": {}, "y": {}}, {"band": np.arange(V)}) for name in LOGS}, [])


def write(recorder, steps):
    for step in steps:
        fields = {"x": np.full(V, step + 1, np.float32), "y": np.arange(V, dtype=np.float32) - step}
        logs = {"a.zarr": fields} | ({"b.zarr": fields} if step % 3 == 0 else {})
        recorder.write(step, {"loss": float(step)}, {}, logs)


def left_behind(place, steps, closed):
    """A folder as a recorder leaves it that is closed, or killed after a flush."""
    recorder = open_recorder(place)
    write(recorder, range(steps))
    recorder.flush()
    (recorder.close if closed else recorder.let_go)()


def assert_is(rows, steps):
    np.testing.assert_array_equal(rows["step"], steps)
    np.testing.assert_array_equal(rows["x"], np.repeat(np.array(steps, np.float32)[:, None], V, 1) + 1)
    np.testing.assert_array_equal(rows["y"], np.arange(V) - np.array(steps, np.float32)[:, None])


def assert_holds(place, steps, plain=False):
    check_logs(place)
    for log, own in zip(LOGS, (list(steps), [step for step in steps if step % 3 == 0]), strict=True):
        with xr.open_zarr(place / log) if plain else open_log(place, log) as rows:
            assert_is(rows, own)


def chunks(place):
    """The chunks of records, with what changes if one is written."""
    files = [path for path in place.glob("*.zarr/[xys]*/c/**/*") if path.is_file()]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def test_a_chunk_is_written_once(tmp_path):
    recorder, written = open_recorder(tmp_path), {}
    for step in range(STEPS_IN_CHUNK + 3):
        write(recorder, [step])
        recorder.flush()
        now = chunks(tmp_path)
        assert now | written == now
        written = now
        if step % 11 == 0:
            assert_holds(tmp_path, range(step + 1))
        assert len(list(tmp_path.glob("*.open.*"))) <= 2
    assert len([path for path in written if "a.zarr" in path.parts]) == 3
    recorder.close()
    assert chunks(tmp_path) | written == chunks(tmp_path)
    assert not list(tmp_path.glob("*.open.*"))
    assert_holds(tmp_path, range(STEPS_IN_CHUNK + 3), plain=True)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("first_step", [20, 33, 64, 68, 80])
def test_who_opened_a_log_before_reads_what_it_held(tmp_path, first_step, closed):
    """A folder is continued, wherever it is cut, and grows beyond."""
    left_behind(tmp_path, 70, closed)
    with contextlib.ExitStack() as stack:
        before = [stack.enter_context(open_log(tmp_path, "a.zarr")) for _ in range(4)]
        if closed:
            before += [stack.enter_context(xr.open_zarr(tmp_path / "a.zarr", chunks=None)) for _ in range(4)]
        open_recorder(tmp_path, first_step).let_go()  # and a kill before anything else is written
        assert_holds(tmp_path, range(min(first_step, 70)))
        assert_is(before.pop(), range(70))
        recorder = open_recorder(tmp_path, first_step)
        write(recorder, range(first_step, 90))
        recorder.flush()
        assert_is(before.pop(), range(70))
        write(recorder, range(90, 101))
        recorder.close()
        assert_is(before.pop(), range(70))
    assert_holds(tmp_path, [*range(min(first_step, 70)), *range(first_step, 101)], plain=True)
    assert not list(tmp_path.glob("*.open.*"))


class Kill(BaseException):
    pass


class Killer:
    """Ends what is done in a folder before one of the calls that change something there."""

    def __init__(self):
        self.root, self.left = "", 0
        sys.addaudithook(self.heard)

    def heard(self, event, arguments):
        if self.root and event in ("os.rename", "os.remove", "os.rmdir", "os.truncate", "open"):
            path, mode = str(arguments[0]), arguments[1] if event == "open" else "w"
            if path.startswith(self.root) and isinstance(mode, str) and set(mode) & set("wa+"):
                self.tick()

    def tick(self):
        self.left -= bool(self.root)
        if self.root and not self.left:
            self.root = ""
            raise Kill

    def during(self, act, place, calls):
        """Whether it was killed, before so many calls."""
        self.root, self.left = str(place), calls
        try:
            act()
        except Kill:
            return True
        finally:
            self.root = ""
        return False


@pytest.fixture(scope="module")
def killer():
    return Killer()


@pytest.fixture
def heard(killer, monkeypatch):
    """The killer, who hears of what tensorstore does, too."""
    resized = history._resized

    def before(array, length):
        killer.tick()
        return resized(array, length)

    monkeypatch.setattr(history, "_resized", before)
    return killer


def sweep(killer, whole, place, act, least):
    """Kill at every few calls, and see that nothing is lost; how many calls there are."""
    killed, calls = True, 1
    while killed:
        shutil.copytree(whole, place)
        killed = killer.during(lambda: act(place), place, calls)
        check_logs(place)
        with open_log(place, "a.zarr") as rows:
            assert_is(rows, range(rows.sizes["step"]))
            assert rows.sizes["step"] >= least
        recorder = open_recorder(place, least)
        assert recorder.arrays["a.zarr"].kept_steps == list(range(least))
        write(recorder, range(least, 70))
        recorder.close()
        assert_holds(place, range(70), plain=True)
        shutil.rmtree(place)
        calls += EVERY
    return calls - EVERY


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
def test_a_kill_while_a_folder_is_opened_loses_nothing(tmp_path, heard, closed):
    left_behind(tmp_path / "whole", 70, closed)
    for first_step in (20, 68):
        points = sweep(
            heard,
            tmp_path / "whole",
            tmp_path / "run",
            lambda at, s=first_step: open_recorder(at, s).let_go(),
            first_step,
        )
        assert points > 10


@pytest.mark.slow
@pytest.mark.parametrize("end", [62, 65])
def test_a_kill_while_records_are_written_loses_nothing(tmp_path, heard, end):
    """In the open block, and where it becomes a chunk."""

    def go_on(place):
        root, heard.root = heard.root, ""
        recorder = open_recorder(place, 60)
        recorder.flush()
        heard.root = root
        try:
            write(recorder, range(60, end))
            recorder.flush()
            recorder.close()
        finally:
            recorder.metrics.file.close()

    left_behind(tmp_path / "whole", 60, closed=False)
    assert sweep(heard, tmp_path / "whole", tmp_path / "run", go_on, 60) > 20


DAMAGES = {
    "flip": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
    "truncate": lambda data: data[:-1],
    "delete": lambda data: None,
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_an_open_block_that_is_damaged_is_named(tmp_path, kind):
    left_behind(tmp_path, 40, closed=False)
    for again in (False, True):  # before and after it is opened once more
        if again:
            open_recorder(tmp_path, 36).let_go()
        block = tmp_path / "a.open.32"
        data = block.read_bytes()
        block.unlink()
        if (damaged := DAMAGES[kind](data)) is not None:
            block.write_bytes(damaged)
        for look in (
            lambda: open_log(tmp_path, "a.zarr"),
            lambda: check_logs(tmp_path),
            lambda: open_recorder(tmp_path, 36),
        ):
            with pytest.raises(Damaged, match=rf"^{block} is damaged .*; remove that run's folder"):
                look()
        block.write_bytes(data)
    assert_holds(tmp_path, range(36))


def test_records_in_chunks_and_in_the_block_are_one_array(tmp_path):
    left_behind(tmp_path, 40, closed=False)
    expected = np.arange(V) - np.arange(40, dtype=np.float32)[:, None]
    for key in (3, 35, -1, slice(30, 36), slice(None, None, -5), slice(0, 0), [39, 0, 33], [1, 2], (slice(30, 35), 2)):
        with open_log(tmp_path, "a.zarr") as rows:
            np.testing.assert_array_equal(rows.y[key], expected[key])
    with open_log(tmp_path, "a.zarr") as rows:
        assert rows.y.sel(step=38, token=2) == 2 - 38
        np.testing.assert_array_equal(rows.y[[0, 39], [4, 1]], expected[np.ix_([0, 39], [4, 1])])


def test_without_a_manifest_whole_records_are_read(tmp_path):
    left_behind(tmp_path, 40, closed=False)
    (tmp_path / "manifest.json").unlink()
    with (tmp_path / "a.open.32").open("ab") as block:
        block.write(b"torn")
    assert_holds(tmp_path, range(40))
    recorder = open_recorder(tmp_path, 40)
    write(recorder, range(40, 70))
    recorder.close()
    assert_holds(tmp_path, range(70), plain=True)
