"""What a terminal gets that a file does not, and what a log gets."""

import itertools

import pytest

from tied_lm.cli import progress, terminal


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
