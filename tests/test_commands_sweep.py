"""The sweep, as a person calls it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

from tests.test_commands import ROOT, SMALL, call, contents, summary_of
from tied_lm.checks import ConfigError
from tied_lm.cli import sweep
from tied_lm.cli.workers import cores_of, run_workers
from tied_lm.config.folder import locked
from tied_lm.study.comparison import read_diverged
from tied_lm.train.loop import Interrupted

SHORT = [*SMALL, "--config.train.steps=8", "--config.compare.seeds=1"]


@pytest.fixture
def here(monkeypatch, capsys):
    """Call the script in this process, which saves the time of imports."""
    monkeypatch.chdir(ROOT)

    def call_main(*arguments, stop=False):
        event = threading.Event()
        if stop:
            event.set()
        sweep.main(list(arguments), event)
        return capsys.readouterr()

    return call_main


@pytest.mark.slow
def test_a_grid_point_by_point_and_by_workers(tmp_path, here):
    place = tmp_path / "sweep"
    arguments = [f"--workdir={place}", *SHORT, "--grid=data.reversibility=0,1", "--grid", "seed=3,4"]
    with pytest.raises(ConfigError, match=r"index = 4 .*; allowed: 0 to 3, since the grid has 4 points"):
        here(*arguments, "--index=4")
    assert not place.exists()

    out, err = here(*arguments, "--index=3")
    assert not out
    assert "1 of 4 points are complete" in err
    assert not (place / "sweep.html").exists()
    third = place / "003-reversibility=1-seed=4"
    assert [p.name for p in place.iterdir() if p.is_dir()] == [third.name]
    before = contents(third)

    with pytest.raises(Interrupted, match="stopped after 0 updates"):
        here(*arguments, stop=True)
    done = call("sweep", *arguments, "--workers=2")
    assert done.returncode == 0, done.stderr
    assert "3 of 4 points to do" in done.stderr
    assert "3 of 3 points, about 0:00 left" in done.stderr
    after = contents(third)
    # The table of all points, which a finished sweep leaves in each of them for TensorBoard, alone is new.
    assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == {
        name for name in {**before, **after} if name.endswith(".hparams")
    }

    results = json.loads((place / "results.json").read_text())
    assert [point["settings"] for point in results["points"]] == [
        {"data.reversibility": r, "seed": s} for r in (0.0, 1.0) for s in (3, 4)
    ]
    for point in results["points"]:
        summary = summary_of(place / point["folder"])
        assert point["differences"]["tied"] == summary["difference"]  # of one seed there is nothing to adjust
        assert point["caveats"] == {arm: values["caveats"] for arm, values in summary["arms"].items()}
        assert point["eval_loss"] == {arm: values["eval_loss"] for arm, values in summary["arms"].items()}
        assert summary["seeds"] == [point["settings"]["seed"]]
        assert f"{point['differences']['tied']['mean']:+.4f}" in done.stdout
    page = (place / "sweep.html").read_text()
    assert page.count('<svg role="img"') == 3
    assert page.count("/report.html") == 4

    finished = contents(place)
    out, err = here(*arguments)
    assert out == done.stdout
    assert "0 of 4 points to do" in err
    assert contents(place) == finished
    with pytest.raises(ConfigError, match=r"grid\.seed: \[3, 4\] -> \[3, 5\]"):
        here(*arguments[:-1], "seed=3,5")


@pytest.mark.slow
def test_a_point_that_fails_or_diverges_does_not_end_the_sweep(tmp_path, here, capsys):
    place = tmp_path / "sweep"
    grid = ["--config.optimizer.name=sgd", "--grid=optimizer.learning_rate=0.1,1e20"]
    arguments = [f"--workdir={place}", *SHORT, *grid]
    with pytest.raises(Interrupted):
        here(*arguments, stop=True)
    with locked(place / "000-learning_rate=0.1"), pytest.raises(SystemExit) as exit_:
        here(*arguments)
    # A message as the code is printed, and the exit status is 1.
    why = "a folder that no other process is writing"
    name = "000-learning_rate=0.1"
    assert exit_.value.code.startswith(f"error: 1 of 2 points failed: {name}: workdir = ")
    assert exit_.value.code.endswith(why)
    with locked(place / name):
        done = call("sweep", *arguments, "--workers=2")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: 1 of 1 points failed: {name}: workdir = ")
    assert last.endswith(why)
    err = capsys.readouterr().err
    assert "000-learning_rate=0.1 failed: workdir" in err
    assert "001-learning_rate=1e+20: tied diverged (" in err
    assert set(read_diverged(place / "001-learning_rate=1e+20")) == {"tied", "untied"}

    out, err = here(*arguments)
    assert "1 of 2 points to do" in err
    assert "Diverged in some seed, and count as an infinite loss" in out
    (combination,) = json.loads((place / "results.json").read_text())["combinations"]
    assert [own["rates"] for own in combination["own"].values()] == [{"optimizer.learning_rate": 0.1}] * 2
    assert "own best" in out


def steps_in(checkpoints):
    """The steps that are saved."""
    return [int(p.name) for p in checkpoints.glob("*") if p.name.isdecimal()]


@pytest.mark.slow
def test_an_interrupt_reaches_the_workers_and_loses_nothing(tmp_path):
    place = tmp_path / "sweep"
    arguments = [*SHORT, "--config.train.steps=100000", "--config.checkpoint.every=50", "--grid=seed=3,4"]
    command = [sys.executable, "-m", "experiments.sweep", f"--workdir={place}", "--workers=2", *arguments]
    saved = [place / f"00{i}-seed={seed}/tied/seed{seed}/checkpoints" for i, seed in enumerate((3, 4))]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        # Of any step, since the first one is soon replaced.
        while not all(steps_in(path) for path in saved) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped after 0 of 2 points; what the others did is saved; the same command continues" in err
    assert "failed" not in err
    for path in saved:
        (line, *_) = reversed((path.parent / "metrics.jsonl").read_text().splitlines())
        assert json.loads(line)["step"] <= max(steps_in(path)) < 100_000
        with locked(path.parents[2]):  # no worker is left
            pass


@pytest.mark.slow
def test_the_workers_of_a_killed_sweep_save_and_end(tmp_path):
    place = tmp_path / "sweep"
    arguments = [*SHORT, "--config.train.steps=100000", "--config.checkpoint.every=50", "--grid=seed=3,4"]
    command = [sys.executable, "-m", "experiments.sweep", f"--workdir={place}", "--workers=2", *arguments]
    saved = [place / f"00{i}-seed={seed}/tied/seed{seed}/checkpoints" for i, seed in enumerate((3, 4))]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not all(steps_in(path) for path in saved) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    deadline = time.monotonic() + 60
    free: set[int] = set()
    while len(free) < 2 and time.monotonic() < deadline:
        for number, path in enumerate(saved):
            with contextlib.suppress(ConfigError), locked(path.parents[2]):
                free.add(number)
        time.sleep(0.1)
    assert free == {0, 1}  # no worker is left
    for path in saved:
        *_, line = (path.parent / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] <= max(steps_in(path)) < 100_000


WORKER = """
import os, sys
from tied_lm.cli.workers import answer, parts_to_do, stop_with_parent
stop_with_parent()
for part in parts_to_do():
    if part == 2:
        os.kill(os.getpid(), 9)
    answer(f"{part} is odd" if part % 2 else None)
    print(f"did {part} on", len(os.sched_getaffinity(0)), file=sys.stderr)
    if part == 4:
        sys.exit("error: no more of it")
"""


def test_each_worker_does_parts_one_after_the_other_and_one_that_ends_is_replaced():
    told = []
    command = [sys.executable, "-c", WORKER]
    run_workers(command, [0, 1, 2, 3, 4, 6], 1, threading.Event(), lambda *part: told.append(part))
    expected = [(0, None), (1, "1 is odd"), (2, "ended by SIGKILL"), (3, "3 is odd"), (4, None)]
    assert told == [*expected, (6, "no more of it")]


def test_workers_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 3, 5, 7, 9})
    assert [cores_of(worker, 2) for worker in range(2)] == [[1, 3], [5, 7, 9]]
    assert [cores_of(worker, 7) for worker in range(7)] == [[1], [3], [5], [7], [9], [1], [3]]


# Does at once what it is given, and leaves what it was asked for and how it ended.
SBATCH = """#!/bin/sh
cat > job.sh
echo "$@" >> asked
for argument in "$@"; do
    case "$argument" in --array=*) points=$(echo "${argument#--array=}" | tr , ' ');; esac
done
for point in ${points:-table}; do
    SLURM_ARRAY_TASK_ID=$point sh job.sh >> out 2>> err || echo "$point: $?" >> failed
done
echo '17;cluster'
"""


@pytest.mark.slow
def test_a_script_for_slurm_does_each_point_and_then_the_table(tmp_path, here):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o700)
    place = tmp_path / "it's a sweep"
    arguments = [f"--workdir={place}", *SHORT, "--grid", "seed=3,4"]
    script, _ = here(*arguments, "--sbatch")
    assert not place.exists()
    with pytest.raises(Interrupted):
        here(*arguments, stop=True)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", script, "sh", "--time=60", "--gpus=1"]
    with locked(place / "001-seed=4"):  # where this point fails, as on a node that breaks
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    asked = (tmp_path / "asked").read_text().splitlines()
    options = "--time=60 --gpus=1"
    assert asked == [f"--parsable --array=0,1 {options}", f"--dependency=afterany:17 {options}"]
    assert (tmp_path / "failed").read_text() == "1: 1\ntable: 1\n"  # the table tries it once more

    script, _ = here(*arguments, "--sbatch")
    assert "--array=1 " in script
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=300)
    expected, _ = here(*arguments)
    table, named, _ = expected.partition("\nPicture")  # whose paths are those of a working directory
    assert named
    assert table in (tmp_path / "out").read_text()
    again, _ = here(*arguments, "--sbatch")
    assert "--array" not in again


def test_points_share_their_programs_where_they_can_and_else_leave_none(tmp_path, here, monkeypatch):
    kept = {}

    def train(place, plan, stop, start):
        arm = plan.arms["tied"]
        arm.trainer.init(0)
        kept[place.name] = type(arm.trainer).init._cache_size()

    monkeypatch.setattr("tied_lm.study.comparison.complete", train)
    jax.clear_caches()
    grid = ["--grid", "optimizer.learning_rate=0.1,0.2", "--grid", "model.features=3,4"]
    _, err = here(f"--workdir={tmp_path / 'sweep'}", *SHORT, *grid)
    assert "0 of 4 points are complete" in err
    names = [f"00{i}-learning_rate={rate}-features={width}" for i, rate, width in ((0, 0.1, 3), (2, 0.2, 3))]
    assert list(kept)[:2] == names
    assert list(kept.values()) == [1, 1, 1, 1]
