"""Every file of a run, damaged in several ways: noticed, or without consequence."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tied_lm import open_run
from tied_lm.checks import ConfigError
from tied_lm.config import to_dict
from tied_lm.files import Damaged

CONFIG = tiny.make_config()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    place = tmp_path_factory.mktemp("finished") / "run"
    tiny.train(place, CONFIG)
    return place


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    place = tmp_path_factory.mktemp("unfinished") / "run"
    with pytest.raises(Exception, match="stopped after"):
        tiny.train(place, CONFIG, stop_after=20)
    return place


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def swap_lines(data):
    lines = data.split(b"\n")
    if len(lines) < 3:
        return None
    middle = len(lines) // 2
    lines[middle - 1], lines[middle] = lines[middle], lines[middle - 1]
    return b"\n".join(lines)


DAMAGES = {
    "flip": flip,
    "truncate": lambda data: data[: len(data) // 2],
    "delete": lambda data: None,
    "empty": lambda data: b"",
    "swap lines": swap_lines,
}


def everything(place):
    """All that a reader is given of a run."""
    run = open_run(place)
    found = {"config": to_dict(run.config), "scalars": {tag: run.scalars(tag) for tag in sorted(run.tags())}}
    for name in ("rows", "probe", "heldout"):
        with getattr(run, name) as rows:
            found |= {f"{name}/{field}": np.asarray(rows[field]).tolist() for field in map(str, rows.variables)}
    return repr(found)


def files(place):
    """The files that a reader looks at, by their names in the folder; of arrays that are alike one is taken."""
    logs = ("rows.zarr", "probe.zarr", "heldout.zarr")
    named = [name for name in ("config.json", "metrics.jsonl", "manifest.json") if (place / name).exists()]
    inside = [p.relative_to(place) for log in logs for p in sorted((place / log).rglob("*")) if p.is_file()]
    arrays = ("zarr.json", "step", "lookup", "update", "band", "nll_0")
    return named + [str(path) for path in inside if path.parts[1] in arrays]


def is_silent(place, before):
    """Whether a damaged folder is read without a word as something else than it was."""
    try:
        return everything(place) != before
    except (Damaged, ConfigError, FileNotFoundError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_damage_is_noticed_or_harmless(state, kind, request, tmp_path):
    whole = request.getfixturevalue(state)
    place = tmp_path / "run"
    shutil.copytree(whole, place, ignore=shutil.ignore_patterns("checkpoints"))
    before, silent = everything(place), []
    for name in files(place):
        path = place / name
        data = path.read_bytes()
        damaged = DAMAGES[kind](data)
        if damaged == data or (damaged is None and kind != "delete") or not data:
            continue
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        if is_silent(place, before):
            silent.append(name)
        path.write_bytes(data)
    assert everything(place) == before
    assert silent == []


@pytest.mark.parametrize("name", ["rows.zarr/step/c/0", "probe.zarr/lookup/c/0/0", "metrics.jsonl"])
def test_a_run_with_a_hole_is_not_continued(unfinished, tmp_path, name):
    place = tmp_path / "run"
    shutil.copytree(unfinished, place)
    (place / name).unlink()
    for _ in range(2):  # not even at a second try
        with pytest.raises(Damaged, match=rf"^{place / Path(name).parts[0]} is damaged .*; remove that run's folder"):
            tiny.train(place, CONFIG)


def test_steps_that_a_log_lacks_are_named(unfinished, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(unfinished, place)
    (place / "manifest.json").unlink()
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(line for line in lines if not line.startswith('{"step": 6,')))
    with pytest.raises(Damaged, match=r"metrics\.jsonl lacks what was written at step 6; "):
        tiny.train(place, CONFIG)


def test_curves_that_were_damaged_can_be_given_up(unfinished, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(unfinished, place)
    (events,) = place.glob("events.*")
    events.write_bytes(flip(events.read_bytes()))
    with pytest.raises(Damaged, match=rf"^{events} is damaged .*; remove it and manifest\.json to continue"):
        tiny.train(place, CONFIG)
    events.unlink()
    (place / "manifest.json").unlink()
    tiny.train(place, CONFIG)
    assert open_run(place).last()["step"] == 39


def test_what_a_kill_left_of_a_write_is_not_mixed_with_the_next(unfinished, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(unfinished, place)
    for path in [*place.glob("*.zarr/*/zarr.json"), *place.glob("*.zarr/*/c/*/*")]:
        path.with_name(f"{path.name}.__lock").write_bytes(b"x" * 10_000)
    tiny.train(place, CONFIG)
    assert open_run(place).rows.sizes["step"] == len(tiny.ROW_STEPS)
    assert not list(place.rglob("*.__lock"))
