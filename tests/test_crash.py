"""A kill at each call that changes a file, and what is on the disk by then."""

import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.tracing import trace

CONFIG = tiny.make_config("train.steps=20", "checkpoint.keep=1")
EVERY = 61
TRAIN = """
import sys
from pathlib import Path
from tests import tiny
tiny.train(Path(sys.argv[1]), tiny.make_config("train.steps=20", "checkpoint.keep=1"))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The calls of a run, and its folder as it was before many of them."""
    return trace(tmp_path_factory.mktemp("traced"), TRAIN, EVERY)


@pytest.mark.slow
def test_wherever_a_run_is_killed_the_same_command_ends_in_the_same_bits(traced):
    run, copies, calls = traced
    numbers = sorted(int(path.name) for path in copies.iterdir())
    operations = {calls[number][0] for number in numbers}
    assert len(numbers) >= 100
    assert operations >= {"open", "write", "rename", "fsync", "unlink", "mkdir"}
    for number in numbers:
        place = copies / str(number)
        try:
            tiny.train(place, CONFIG)
            tiny.assert_same_run(place, run, CONFIG)
        except BaseException as error:
            error.add_note(f"killed before call {number}: {calls[number]}")
            raise
        shutil.rmtree(place)


def test_all_is_on_the_disk_before_a_checkpoint_is_begun(traced):
    run, _, calls = traced
    data, names, begun = set(), {}, 0  # files and, by folder, names that are not on the disk yet
    for operation, *texts in calls:
        path, *new = map(Path, texts)
        if run / "checkpoints" in path.parents:
            if operation == "mkdir" and path.parent.name == "checkpoints":
                begun += 1
                assert not data
                assert not {folder: found for folder, found in names.items() if found}
            continue
        if operation == "fsync":
            data.discard(path)
            names.pop(path, None)
            continue
        if operation in ("write", "pwrite", "pwrite64", "ftruncate", "ftruncate64"):
            data.add(path)
            continue
        for changed in (path, *new):
            names.setdefault(changed.parent, set()).add(changed.name)
        names.pop(run.parent, None)  # not this run's to wait for
        if new and path in data:
            data.remove(path)
            data.add(new[0])
    assert begun == 3
