"""What a terminal gets that a file does not, and what a log gets."""

import itertools
import re
import sys
import threading
import types
from pathlib import Path

import pytest

from configs import toy
from tied_lm.cli import compare, progress, sweep, terminal
from tied_lm.cli.command import parse
from tied_lm.cli.fields import comments_in
from tied_lm.config import flatten


@pytest.mark.parametrize(
    ("is_terminal", "environment", "bold", "width"),
    [
        (True, {"TERM": "xterm"}, "\x1b[1mx\x1b[0m", 70),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "x", 70),
        (True, {"TERM": "dumb"}, "x", None),
        (False, {"TERM": "xterm"}, "x", None),
    ],
)
def test_colour_and_width_are_those_of_a_terminal(monkeypatch, is_terminal, environment, bold, width):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in (environment | {"COLUMNS": "70"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert (terminal.bold("x"), terminal.width()) == (bold, width)


def test_a_log_has_a_line_every_half_minute_and_one_for_each_run(monkeypatch, capsys):
    seconds = itertools.count()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    shown = progress.Progress([("tied", 100), ("untied", 4)])
    for arm, updates in {"tied": 100, "untied": 4}.items():
        report = shown.start_run(arm, 3)
        for _ in range(updates):
            report(1)
    shown.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "tied seed 3: 30 of 100 updates",
        "tied seed 3: 61 of 100 updates",
        "tied seed 3: 92 of 100 updates",
        "tied seed 3: run 1 of 2 done",
        "untied seed 3: run 2 of 2 done",
    ]
    assert lines[0].endswith("about 1:16 left")
    assert lines[-1].endswith("done, in 1:46")


def test_a_notebook_has_one_line_that_is_written_over(monkeypatch, capsys):
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    shown = progress.Progress([("tied", 4), ("untied", 4)])
    for arm in ("tied", "untied"):
        report = shown.start_run(arm, 3)
        for _ in range(4):
            report(1)
        shown.bar.refresh()
    shown.close()
    written = capsys.readouterr().err
    assert "\n" not in written
    assert "tied seed 3  50%" in written
    assert "untied seed 3 100%" in written.split("\r")[-3]


def stdout_of(capsys, call):
    with pytest.raises(SystemExit) as exit_:
        call()
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_help_has_every_field_with_what_the_config_says_of_it(capsys, tmp_path):
    fields = flatten(toy.get_config().to_dict())
    found = comments_in(Path(toy.__file__).read_text(encoding="utf-8"))
    assert found.keys() == fields.keys()
    told = stdout_of(capsys, lambda: parse("", ["--help"]))
    assert max(map(len, told.splitlines())) <= 80
    assert all(f"--config.{field}=" in told for field in fields)
    told = " ".join(told.split())
    assert "--config.model.features=32 D, embedding width --config.model.body=none none | mlp | lstm" in told
    assert "which scores; tied | untied | scaled_input" in told
    assert "| coupled_adam (one second moment for all rows of the matrix that scores)" in told
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit(3)\n\n\ndef get_config():\n    c.model.features = 48  # mine\n")
    told = " ".join(stdout_of(capsys, lambda: parse("", [f"--config={mine}", "--help"])).split())
    assert "--config.model.features=48 mine --config.model.body=none none | mlp" in told


def test_the_config_is_printed_as_flags_that_give_it_again(capsys):
    flags = ["--config.train.steps=77", "--config.data.paths=['a b', 'c']", "--config.optimizer.learning_rate=1e-5"]
    told = stdout_of(capsys, lambda: parse("", [*flags, "--print_config"]))
    lines = dict(line.split("=", 1) for line in told.splitlines())
    assert lines["--config.train.steps"] == "77  # default: 1000"
    assert lines["--config.model.features"] == "32"
    again = [line for line in told.splitlines() if "paths" not in line and "tokens=''" not in line]
    assert parse("", [re.sub("  # .*", "", line) for line in again]).values["optimizer"]["learning_rate"] == 1e-5


TINY = [
    *("--config.data.vocab_size=20", "--config.data.classes=4", "--config.data.batch_size=2", "--config.data.length=5"),
    *("--config.model.features=4", "--config.train.steps=39", "--config.optimizer.warmup_steps=3", "--dry_run"),
    *("--config.data.eval_tokens=23", "--config.log.probe_tokens=17", "--config.compare.seeds=3"),
]


def test_a_dry_run_says_what_it_takes_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    compare.main(["--config=configs/toy.py", *TINY], threading.Event())
    head, tied, untied, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["arm", "parameters", "updates", "memory", "disk", "start", "time"]
    assert (tied.split()[:3], untied.split()[:3]) == (["tied", "80", "39"], ["untied", "160", "39"])
    assert re.fullmatch(r"6 runs in runs/toy-\w{8}, at most .* MB there, about \d:\d\d; nothing was written", last)
    sweep.main([*TINY, "--grid=optimizer.learning_rate=0.1,0.2"], threading.Event())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("2 points, 12 runs in runs/sweep-toy-")
    assert not list(tmp_path.iterdir())
