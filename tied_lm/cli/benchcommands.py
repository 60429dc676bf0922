"""The benchmark of whole commands, each in a process of its own."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

POINTS = 8  # of the sweep


def seconds_of(*arguments: object) -> float:
    """How long a command takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tied_lm.cli", *map(str, arguments)], check=True, capture_output=True)
    return time.perf_counter() - start


def measure_start() -> dict[str, float]:
    """Seconds from the command to the end of a run of one update, and of --help. Compiled programs are cached."""
    with tempfile.TemporaryDirectory() as folder:
        one = ["--config.train.steps=1", "--config.optimizer.warmup_steps=0"]
        _, first = (seconds_of("train", f"--workdir={folder}/{i}", *one) for i in range(2))
    return {"first start": first, "help": seconds_of("train", "--help")}


def measure_comparison(rounds: int) -> float:
    """Seconds of a default comparison, ten runs, its programs cached."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = [seconds_of("compare", f"--workdir={Path(folder) / str(i)}") for i in range(1 + rounds)]
    return sorted(seconds[1:])[rounds // 2]


def measure_sweep(rounds: int) -> float:
    """Time of a sweep of default points, of one seed each, by one process over that by two workers."""
    rates = ",".join(f"{0.01 + 0.002 * i:g}" for i in range(POINTS))
    sweep = ("sweep", "--config.compare.seeds=1", f"--grid=optimizer.learning_rate={rates}")
    with tempfile.TemporaryDirectory() as folder:
        ratios = [
            one / two
            for one, two in (
                [seconds_of(*sweep, f"--workers={w}", f"--workdir={folder}/{i}-{w}") for w in (1, 2)]
                for i in range(1 + rounds)
            )
        ]
    return sorted(ratios[1:])[rounds // 2]
