"""A disk without room, in bytes or in files, at any moment: one line, and the same run goes on once there is room."""

import gc
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIG = tiny.make_config("train.steps=20", "checkpoint.keep=1")
ROOM = "size=64m,nr_inodes=10000"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that had room."""
    place = tmp_path_factory.mktemp("whole") / "run"
    tiny.train(place, CONFIG)
    return place


def mount(*arguments):
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


@contextmanager
def disk(folder, room):
    """A file system of its own in a folder."""
    folder.mkdir()
    if not sys.platform.startswith("linux") or not mount("-t", "tmpfs", "-o", room, "tmpfs", folder):
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def assert_it_goes_on(folder, room, whole):
    """Train where there is too little room, then where there is enough."""
    with disk(folder, room):
        with pytest.raises(OSError, match=rf"^[^\n]*{folder}/run[^\n]*No space left on device|No space .*{folder}/run"):
            tiny.train(folder / "run", CONFIG)
        gc.collect()  # files that could not be closed
        assert mount("-o", f"remount,{ROOM}", folder)
        tiny.train(folder / "run", CONFIG)
        tiny.assert_same_run(folder / "run", whole, CONFIG)


# A run takes 576 KiB at its end, and more while checkpoints are replaced.
@pytest.mark.parametrize("kilobytes", [16, 120, 300, 500, 560])
def test_no_bytes_left(whole, tmp_path, kilobytes, capfd):
    assert_it_goes_on(tmp_path / "disk", f"size={kilobytes}k", whole)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", range(4, 576, 20))
def test_no_bytes_left_at_any_moment(whole, tmp_path, kilobytes):
    assert_it_goes_on(tmp_path / "disk", f"size={kilobytes}k", whole)


@pytest.mark.parametrize("files", [3, 50, 160])
def test_no_more_files(whole, tmp_path, files):
    assert_it_goes_on(tmp_path / "disk", f"nr_inodes={files}", whole)
