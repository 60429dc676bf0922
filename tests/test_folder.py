"""Whose folder it is."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.cli import evaluate, geometry, report, runs, show
from tied_lm.config import VERSION, override, to_dict
from tied_lm.config.folder import check, locked
from tied_lm.files import Damaged, read_json, write_json
from tied_lm.record.scalars import is_finished, read_metrics
from tied_lm.study.comparison import check_runs

ROOT = Path(__file__).parent.parent
VALUES = to_dict(tiny.make_config())


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(folder, values, *words):
    """The folder is refused with one line that holds these words, and left as it is."""
    before = contents(folder)
    with pytest.raises(ConfigError) as raised:
        check(folder, values)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("workdir = ")
    assert all(word in message for word in (str(folder), *words)), message
    assert contents(folder) == before


def test_a_free_folder_is_accepted_and_nothing_is_written(tmp_path):
    check(tmp_path / "new" / "one", VALUES)
    check(tmp_path, VALUES)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".lock").touch()
    check(tmp_path, VALUES)


def test_a_folder_of_the_same_config_is_accepted(tmp_path):
    write_json(tmp_path / "config.json", VALUES)
    (tmp_path / "metrics.jsonl").touch()
    check(tmp_path, VALUES)


def test_a_folder_of_another_config_is_refused_by_naming_the_fields(tmp_path):
    write_json(tmp_path / "config.json", VALUES)
    other = to_dict(tiny.make_config("optimizer.learning_rate=0.5", "train.steps=40", "log.tokens=3"))
    refused(
        tmp_path,
        other,
        "log.tokens: [] -> [3]",
        "optimizer.learning_rate: 0.05 -> 0.5",
        "train.steps: 39 -> 40",
    )


def test_more_and_fewer_fields_differ_too(tmp_path):
    write_json(tmp_path / "config.json", {**VALUES, "extra": 1})
    refused(tmp_path, VALUES, "extra: 1 -> None")
    write_json(tmp_path / "config.json", {name: v for name, v in VALUES.items() if name != "seed"})
    refused(tmp_path, {**VALUES, "seed": 5}, "seed: 0 -> 5")


def test_a_field_that_the_folder_lacks_has_its_default(tmp_path):
    write_json(tmp_path / "config.json", {name: v for name, v in VALUES.items() if name not in ("seed", "checkpoint")})
    check(tmp_path, {**VALUES, "checkpoint": {"every": 500, "keep": 2}})
    refused(tmp_path, VALUES, "checkpoint.every: 500 -> 9")


def test_free_fields_may_differ(tmp_path):
    compare = {"baseline": "untied", "seeds": 3, "margin": 0.1}
    write_json(tmp_path / "config.json", {**VALUES, "compare": compare})
    check(tmp_path, {**VALUES, "compare": compare | {"seeds": 5, "margin": 0.2}})
    refused(tmp_path, {**VALUES, "compare": compare | {"baseline": "tied"}}, "compare.baseline: 'untied' -> 'tied'")


@pytest.mark.parametrize("text", [b"", b'{"seed": 0', b"[1, 2]", b"null", b"3", b"\xff\xfe\x00"])
def test_an_unreadable_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    refused(tmp_path, VALUES, "config.json can be read")


def test_a_config_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")  # which would be waited for
    with pytest.raises(ConfigError, match="it is no file"):
        check(tmp_path, {"a": 1})


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("hello")
    refused(tmp_path, VALUES, "a new or empty folder, or one of an earlier run")


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("hello")
    refused(tmp_path / "file", VALUES)


def test_a_run_refuses_a_folder_that_is_not_free(tmp_path):
    config = tiny.make_config()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="a new or empty folder"):
        tiny.train(tmp_path, config)
    assert contents(tmp_path) == {"notes.txt": b"hello"}


def test_a_run_refuses_the_folder_of_another_config(tmp_path):
    write_json(tmp_path / "config.json", VALUES)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate: 0\.05 -> 0\.1"):
        tiny.train(tmp_path, tiny.make_config("optimizer.learning_rate=0.1"))
    assert contents(tmp_path) == before


LOCK = """
import sys
from pathlib import Path
from tied_lm.config.folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    command = [sys.executable, "-c", LOCK, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="a folder that no other process is writing"), locked(tmp_path / "run"):
            pass
        first.kill()
        first.wait()
    with locked(tmp_path / "run"):
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert "a folder that no other process is writing" in second.stderr
    with locked(tmp_path / "run"):
        pass


def test_a_lock_needs_a_folder_that_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder that can be written"), locked(tmp_path / "file" / "run"):
        pass


def test_json_is_replaced_in_one_go(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})
    with path.open() as before:
        write_json(path, {"a": 2})
        assert json.load(before)["a"] == 1
    assert read_json(path, "") == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("", []),
        ('{"step": 0}\n{"step": 5}\n', [0, 5]),
        ('{"step": 0}\n{"step": 5, "loss/tr', [0]),
        ('{"step": 0}\n{"step": 5}', [0]),
        ('{"st', []),
    ],
)
def test_a_torn_last_line_is_left_out(tmp_path, text, steps):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [line["step"] for line in read_metrics(tmp_path)] == steps
    assert is_finished(tmp_path, 5) == (5 in steps)
    assert not is_finished(tmp_path, 6)


@pytest.mark.parametrize("command", [evaluate, geometry, report, runs, show])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {}),
        ("config.json", {"compare": 3}),
        ("config.json", {"seed": 0, "model": "tied"}),
        ("config.json", {"seed": 0, "model": {"tying": "tied"}, "compare": {"arms": 3, "baseline": "a", "seeds": 1}}),
        ("sweep.json", {}),
        ("sweep.json", VALUES | {"compare": {"arms": {}, "baseline": "a", "seeds": 1}, "grid": {"seed": 3}}),
    ],
)
def test_a_config_of_another_shape_is_named(tmp_path, capsys, command, file, content):
    write_json(tmp_path / file, content)
    try:
        command.main([str(tmp_path)], threading.Event())
        said = capsys.readouterr().out
        assert command in (runs, show)  # which tell how a folder stands
    except (ConfigError, Damaged) as error:
        said = str(error)
    assert str(tmp_path) in said
    assert "damaged" in said or command in (evaluate, geometry)  # which take no comparison and no sweep
    assert len(said.strip().splitlines()) <= 3


def test_a_folder_of_another_run_is_no_run_of_a_comparison(values, tmp_path):
    for field in (*tiny.FIELDS, "compare.seeds=2"):
        override(values, *field.split("="))
    plan = tiny.plan_of(values)
    check_runs(tmp_path, plan)
    for arm, config in plan.comparison.runs():
        place = tmp_path / arm / f"seed{config.seed}"
        place.mkdir(parents=True)
        write_json(place / "config.json", to_dict(config) | {"version": VERSION})
    check_runs(tmp_path, plan)
    for one, other in (("seed0", "x"), ("seed1", "seed0"), ("x", "seed1")):
        (tmp_path / "tied" / one).rename(tmp_path / "tied" / other)
    with pytest.raises(ConfigError, match=r"seed0' is not .*; allowed: a folder of the same config; here seed: "):
        check_runs(tmp_path, plan)
    (tmp_path / "tied/seed0/config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"a folder whose config\.json can be read .* is damaged"):
        check_runs(tmp_path, plan)


def test_no_metrics_yet(tmp_path):
    assert read_metrics(tmp_path) == []
    assert not is_finished(tmp_path, 1)


def test_a_folder_of_an_older_version_is_not_continued(tmp_path):
    write_json(tmp_path / "config.json", {"seed": 0})  # as they were before there was a version
    check(tmp_path, {"seed": 0})
    with pytest.raises(ConfigError, match="a folder of the same config; here version: 1 -> 2"):
        check(tmp_path, {"seed": 0, "version": 2})


def test_a_lock_that_is_a_link_is_refused_and_what_it_points_at_is_left(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis.tex").write_text("hello")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(ConfigError, match="a folder that can be written"), locked(tmp_path / "run"):
        pass
    (tmp_path / "run" / ".lock").unlink()
    os.link(tmp_path / "thesis.tex", tmp_path / "run" / ".lock")
    with locked(tmp_path / "run"):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "hello"
