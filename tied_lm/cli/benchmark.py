"""Speed and memory, as ratios measured in one run: one table, and benchmark.json."""

import importlib.util
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax

from tied_lm.cli.benchcommands import measure_comparison, measure_start, measure_sweep
from tied_lm.cli.benchruns import count_compilations, measure_dispatch, measure_history, measure_recording
from tied_lm.cli.benchsteps import GROWTH, SHAPES, measure_growth, measure_shape
from tied_lm.cli.command import Parser, set_up_jax
from tied_lm.cli.scale import told_scale
from tied_lm.study.table import table


def main(arguments: list[str], _: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # there is nothing to save
    parser = Parser(description="Measure speed and memory; writes benchmark.json here.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each measurement (default: %(default)s)")
    scale, sizes = "only say what an update takes of a mesh, and write nothing", ("V", "D", "N", "DATA", "VOCAB")
    parser.add_argument("--scale", type=int, nargs=5, metavar=sizes, help=scale)
    flags = parser.parse_args(arguments)
    if flags.scale is not None:
        set_up_jax()
        print(told_scale(*flags.scale))
        return
    rounds = flags.rounds
    with_torch = importlib.util.find_spec("torch") is not None
    if not with_torch:
        print("PyTorch is not installed (extra `bench`), so it is left out", file=sys.stderr)
    set_up_jax()
    shapes = []
    for shape in SHAPES:
        print(f"V, D, N = {shape}", file=sys.stderr)
        shapes.append(measure_shape(shape, rounds * (5 if shape.vocab_size < 1000 else 1), with_torch))
    print("dispatch, recording, commands, growth", file=sys.stderr)
    whole = max(1, rounds // 3)  # of what takes a minute
    found: dict[str, Any] = {
        "shapes": shapes,
        "dispatch / loop": measure_dispatch(5 * rounds),
        "recording on / off": measure_recording(rounds),
        "compilations": count_compilations(),
        "seconds": measure_start() | {"comparison": measure_comparison(whole)},
        "sweep, 1 / 2 workers": measure_sweep(whole),
        "history, ms": 1e3 * measure_history(),
        "growth in V": measure_growth(rounds),
        "about": {"jax": jax.__version__, "devices": str(jax.devices()), "cores": os.cpu_count(), "rounds": rounds},
    }
    Path("benchmark.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    keys = [key for key in shapes[0] if key not in ("shape", "ms")]
    header = ["whole step, ratios", *(s["shape"] for s in shapes)]
    print(table([header, *([key, *(f"{s[key]:.2f}" if key in s else "-" for s in shapes)] for key in keys)]))
    print(f"\n  {found['dispatch / loop']:.1f} x  updates/s of a tiny model, split at each step, over a per-step loop")
    for name, value in found["recording on / off"].items():
        print(f"  {value:.3f}  time of a default run, over that without records of the {name}")
    for field, count in found["compilations"].items():
        print(f"  {count}  programs compiled for a new {field}")
    print(f"  {found['seconds']['comparison']:.1f} s  a default comparison, 10 runs, programs cached")
    print(f"  {found['sweep, 1 / 2 workers']:.2f}  time of a sweep of 8 points by one process, over that by 2 workers")
    print(f"  {found['history, ms']:.0f} ms  to read one token's history from 1,000 records of 50,000 rows")
    print(f"  {found['growth in V']:.2f}   log-log slope of the time of a step in V, {GROWTH[0]:,} to {GROWTH[-1]:,}")
    print(f"  {found['seconds']['first start']:.1f} s  from command to the end of a run of one update")
    print(f"  {found['seconds']['help']:.1f} s  --help")
