"""A kill at each call that changes a file, once the runs of a comparison or a sweep are trained."""

import threading

import pytest

from tests import tiny
from tests.tracing import trace
from tied_lm.cli import compare, sweep

FIELDS = [*tiny.FIELDS, "train.steps=6", "optimizer.warmup_steps=2", "compare.seeds=1"]
ARGUMENTS = [f"--config.{field}" for field in FIELDS]
# The script, its arguments, and what it makes of finished runs.
KINDS = {
    "comparison": (compare, ARGUMENTS, ["summary.json", "report.html"]),
    "sweep": (sweep, [*ARGUMENTS, "--grid=optimizer.learning_rate=0.01,0.05"], ["results.json", "sweep.html"]),
}
# All is made, what stands at the end is removed, and then made again while calls are seen.
CODE = """
import os, sys
from pathlib import Path
from tests.study.test_crash import KINDS, call
from tied_lm.study import picture
picture.svg = lambda picture: "<svg></svg>"
place = Path(sys.argv[1])
call({kind!r}, place)
for name in KINDS[{kind!r}][2]:
    (place / name).unlink()
os.environ["TRACE_ROOT"] = str(place)
call({kind!r}, place)
"""


def call(kind, place):
    script, arguments, _ = KINDS[kind]
    script.main([f"--workdir={place}", *arguments], threading.Event())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_wherever_it_is_killed_the_same_command_ends_alike(undrawn, tmp_path, kind, capsys):
    run, copies, calls = trace(tmp_path, CODE.format(kind=kind), every=1, root="nothing")
    names = KINDS[kind][2]
    numbers = sorted(int(path.name) for path in copies.iterdir())
    assert len(numbers) >= 8
    assert {"write", "rename"} <= {calls[number][0] for number in numbers}
    for number in numbers:
        place = copies / str(number)
        try:
            call(kind, place)
            # Pages hold the time at which their pictures were drawn.
            assert (place / names[0]).read_bytes() == (run / names[0]).read_bytes()
            assert (place / names[1]).stat().st_size == pytest.approx((run / names[1]).stat().st_size, rel=0.01)
        except BaseException as error:
            error.add_note(f"killed before call {number}: {calls[number]}")
            raise
    capsys.readouterr()
