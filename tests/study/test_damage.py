"""Any file of a finished comparison, damaged in any way: named in one line by every command, or without consequence."""

import re
import shutil
import threading
from pathlib import Path

import pytest

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.cli import compare, evaluate, sweep
from tied_lm.files import Damaged

POINT = "000-steps=12"  # the folder of a sweep's first point
FIELDS = [*tiny.FIELDS, "train.steps=12", "compare.seeds=1"]


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :] if data else data


DAMAGES = {
    "flipped": flip,
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: b"\xff\x00garbage\n" * 3,
}
# Of the first run's files one of a kind; N stands for a number or a name that differs from run to run.
KINDS = {
    "config.json",
    "summary.json",
    "report.html",
    "tied/seed0/config.json",
    "tied/seed0/manifest.json",
    "tied/seed0/metrics.jsonl",
    "tied/seed0/events.N",
    "tied/seed0/rows.zarr/zarr.json",
    "tied/seed0/rows.zarr/step/c/0",
    "tied/seed0/probe.zarr/lookup/c/0/0",
    "tied/seed0/heldout.zarr/nll_0/c/0/0",
    "tied/seed0/heldout.zarr/nll_0/zarr.json",
    "tied/seed0/checkpoints/12/_CHECKPOINT_METADATA",
    "tied/seed0/checkpoints/12/about/metadata",
    "tied/seed0/checkpoints/12/metrics/metrics",
    "tied/seed0/checkpoints/12/state/_METADATA",
    "tied/seed0/checkpoints/12/state/manifest.ocdbt",
    "tied/seed0/checkpoints/12/state/d/N",
}
FEW = {"summary.json", "tied/seed0/heldout.zarr/nll_0/c/0/0", "tied/seed0/checkpoints/12/state/d/N"}


def compared(place):
    """What `compare` says of a complete comparison."""
    compare.main([f"--workdir={place}", *(f"--config.{field}" for field in FIELDS)], threading.Event())


def reported(place):
    """The same where the report is missing, and is made from the runs again."""
    (place / "report.html").unlink(missing_ok=True)
    compared(place)


def evaluated(place):
    evaluate.main([str(place / "tied/seed0")], threading.Event())


def swept(place):
    """The table of a sweep whose only point, already complete, is the comparison."""
    fields = (f"--config.{field}" for field in FIELDS)
    sweep.main([f"--workdir={place.parent}", *fields, "--grid=train.steps=12"], threading.Event())


COMMANDS = (compared, reported, evaluated, swept)


@pytest.fixture(scope="module")
def whole(undrawn, tmp_path_factory):
    place = tmp_path_factory.mktemp("sweep") / POINT
    swept(place)
    return place


def copy(whole, tmp_path):
    """The point's folder in a new copy of the sweep."""
    shutil.rmtree(tmp_path / "sweep", ignore_errors=True)
    return Path(shutil.copytree(whole.parent, tmp_path / "sweep")) / POINT


def kind_of(path, place):
    name = re.sub(r"events\.out.*", "events.N", str(path.relative_to(place)))
    return re.sub(r"/state/d/\w+$", "/state/d/N", name)


def of_kinds(place, kinds):
    found = {kind_of(path, place): path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file()}
    assert kinds <= found.keys()
    return [found[kind] for kind in sorted(kinds)]


def refusal_of(command, place):
    try:
        command(place)
    except (ConfigError, Damaged, FileNotFoundError) as error:
        return str(error)
    return None


def assert_noticed_or_harmless(whole, tmp_path, capsys, kinds, damage):
    capsys.readouterr()
    place, silent, expected = copy(whole, tmp_path), [], {}
    for command in COMMANDS:
        command(place)
        expected[command] = capsys.readouterr().out
    for name in of_kinds(whole, kinds):
        data = (whole / name).read_bytes()
        damaged = DAMAGES[damage](data)
        if damaged == data:
            continue
        for command in COMMANDS:
            copy(whole, tmp_path)
            (place / name).write_bytes(damaged)
            refusal = refusal_of(command, place)
            out = capsys.readouterr().out
            if refusal is None and out != expected[command]:
                silent.append((command.__name__, str(name)))
            assert refusal is None or (refusal.isprintable() and str(place) in refusal)
    assert silent == []


@pytest.mark.slow
def test_a_flipped_bit_where_it_matters_most(whole, tmp_path, capsys):
    assert_noticed_or_harmless(whole, tmp_path, capsys, FEW, "flipped")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_kind_of_file(whole, tmp_path, capsys, damage):
    assert_noticed_or_harmless(whole, tmp_path, capsys, KINDS, damage)


@pytest.mark.parametrize("command", [compared, evaluated, swept])
@pytest.mark.parametrize("name", ["metrics.jsonl", "rows.zarr/lookup/c/0/0", "heldout.zarr/zarr.json"])
def test_logs_that_a_command_need_not_read_are_checked_all_the_same(whole, tmp_path, command, name):
    place = copy(whole, tmp_path)
    log = place / "tied/seed0" / name
    log.write_bytes(flip(log.read_bytes()))
    assert str(place) in (refusal_of(command, place) or "")
    log.unlink()
    assert str(place) in (refusal_of(command, place) or "")
