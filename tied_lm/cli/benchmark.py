"""Speed and memory, as ratios measured in one run: one table, and benchmark.json."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from tqdm import tqdm

from tied_lm import TiedEmbedding
from tied_lm.cli.command import Parser, set_up_jax
from tied_lm.config import build_comparison, completed, defaults, override
from tied_lm.model.bodies import Transformer
from tied_lm.model.loss import vocabulary_loss
from tied_lm.model.split import backward, loss_and_gradients, stats_of
from tied_lm.record.history import RowLog
from tied_lm.study.plan import build_arms
from tied_lm.study.table import table
from tied_lm.train.calendar import Schedule
from tied_lm.train.loop import train_run

HEADS, LENGTH = 4, 128  # of the Transformer, and tokens in a sequence


class Shape(NamedTuple):
    vocab_size: int
    features: int
    tokens: int
    layers: int = 0  # of a Transformer; without any there is no body

    def __str__(self) -> str:
        return ", ".join(map(str, self[:3])) + (f" +{self.layers}" if self.layers else "")


SHAPES = (
    Shape(512, 64, 2048),
    Shape(8192, 128, 2048),
    Shape(50257, 256, 1024),
    Shape(50257, 64, 4096),
    Shape(8192, 128, 2048, 4),
    Shape(50257, 256, 1024, 4),
)
GROWTH = (1024, 2048, 4096, 8192, 16384, 32768, 65536)  # V, at D = 64 and N = 1024
Run = Callable[[], object]


def interleave(runs: dict[str, Run], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each run in each round. All runs of a round follow each other, so that noise meets them alike."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in tqdm(range(rounds), leave=False, disable=None):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in times.items()}


def ratio(times: dict[str, np.ndarray], a: str, b: str) -> float:
    """The median over rounds of a / b."""
    return float(np.median(times[a] / times[b]))


def inputs_of(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, inputs and targets (distributed like Zipf's), the same for every library."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, shape.tokens + 1) - 1, shape.vocab_size - 1).astype(np.int32)
    weight = (rng.standard_normal((shape.vocab_size, shape.features)) * 0.02).astype(np.float32)
    return weight, ids[:-1].reshape(-1, LENGTH), ids[1:].reshape(-1, LENGTH)


def jax_step(shape: Shape, kind: str, dtype: str = "float32") -> Run:
    """A whole training step of a tied model: lookup, loss, gradients, Adam, donated state.

    Args:
        kind: `dense` (optax cross-entropy and autodiff), `plain` (this library), or `split` (with row statistics).
    """
    weight, *ids = inputs_of(shape)
    x, y = map(jnp.asarray, ids)
    body = Transformer(dtype, depth=shape.layers, heads=HEADS) if shape.layers else None
    model = TiedEmbedding(shape.vocab_size, shape.features, body, dtype)
    params = model.init(jax.random.key(0), x)["params"] | {"embedding": jnp.asarray(weight)}
    optimizer = optax.adam(1e-3)

    def dense_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, moments = state
        if kind == "dense":
            loss, gradients = jax.value_and_grad(dense_loss)(params, x, y)
            out: Any = loss
        else:
            b = backward(model, params, x, y, train=True)
            gradients, out = b.gradients, (b.loss, stats_of(b)) if kind == "split" else b.loss
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), out

    compiled = jax.jit(step, donate_argnums=0)
    state = (params, optimizer.init(params))

    def run() -> None:
        nonlocal state
        state, out = compiled(state, x, y)
        jax.block_until_ready((state, out))

    return run


def products(shape: Shape) -> Run:
    """The three float32 products of a step and nothing else: a bound on what a step can reach."""
    vocab_size, features, count = shape[:3]
    h, w = jnp.ones((count, features)), jnp.ones((vocab_size, features))
    z = jnp.ones((count, vocab_size))
    run = jax.jit(lambda h, w, z: ((h @ w.T).sum(), (z @ w).sum(), (h.T @ z).sum()))
    return lambda: jax.block_until_ready(run(h, w, z))


def loss_memory(shape: Shape) -> float:
    """Peak temporary memory of the loss and its gradients over that of the dense form, from XLA's own analysis."""
    vocab_size, features, count = shape[:3]
    h, w = (jax.ShapeDtypeStruct((rows, features), jnp.float32) for rows in (count, vocab_size))
    y = jax.ShapeDtypeStruct((count,), jnp.int32)

    def dense(h: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(h @ w.T, y).mean()

    def ours(h: jax.Array, w: jax.Array, y: jax.Array) -> Any:
        return vocabulary_loss(h, w, y, jnp.full(count, 1 / count))

    def peak(function: Callable[..., Any]) -> int:
        analysis: Any = jax.jit(function).lower(h, w, y).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    return peak(ours) / peak(jax.value_and_grad(dense, (0, 1)))


def measure_shape(shape: Shape, rounds: int, with_torch: bool) -> dict[str, Any]:
    runs = {"dense": jax_step(shape, "dense")} | ({} if shape.layers else {"products": products(shape)})
    for dtype in ("float32", "bfloat16"):
        for kind in ("plain", "split"):
            runs[f"{kind} {dtype}"] = jax_step(shape, kind, dtype)
    if with_torch:
        from tied_lm.cli.torch_model import torch_step

        for name, autocast in (("torch float32", False), ("torch bfloat16", True)):
            runs[name] = torch_step(*inputs_of(shape), shape.layers, HEADS, autocast)
    times = interleave(runs, rounds)
    median = {name: float(np.median(t)) for name, t in times.items()}
    ours = min(("split float32", "split bfloat16"), key=median.__getitem__)
    found: dict[str, Any] = {
        "shape": str(shape),
        "ms": {name: 1e3 * seconds for name, seconds in median.items()},
        "split / plain": ratio(times, "split float32", "plain float32"),
        "split / plain, bf16": ratio(times, "split bfloat16", "plain bfloat16"),
        "split f32 / dense": ratio(times, "split float32", "dense"),
        "split bf16 / dense": ratio(times, "split bfloat16", "dense"),
    }
    if not shape.layers:
        found["split f32 / products"] = ratio(times, "split float32", "products")
        found["loss memory / dense"] = loss_memory(shape)
    if with_torch:
        best = min(("torch float32", "torch bfloat16"), key=median.__getitem__)
        found["torch / split"] = ratio(times, best, ours)
    return found


def measure_growth(rounds: int) -> float:
    """Log-log slope of the time of a step with the split against V."""
    times = interleave({str(v): jax_step(Shape(v, 64, 1024), "split") for v in GROWTH}, rounds)
    return float(np.polyfit(np.log(GROWTH), [np.log(np.median(times[str(v)])) for v in GROWTH], 1)[0])


def measure_dispatch(rounds: int) -> float:
    """Updates per second with the split recorded at every step, over those of a loop that fetches each step's."""
    values = completed({}, defaults())
    sizes = {"data.vocab_size": 64, "model.features": 16, "data.batch_size": 4, "data.length": 64}
    for field, value in sizes.items():
        override(values, field, str(value))
    arm = build_arms(build_comparison(values))["tied"]
    trainer, slots = arm.trainer, arm.trainer.slots
    optimizer, model, ahead = trainer.optimizer, trainer.model, arm.stream.ahead(0, slots)

    @jax.jit
    def one(params: Any, moments: Any, step: jax.Array) -> Any:
        batch = ahead.batch(step)
        loss, gradients, stats = loss_and_gradients(model, params, batch.inputs, batch.targets, rows=True)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, (loss, stats)

    state = trainer.init(np.uint32(0))

    def loop() -> None:
        params, moments = state.params, state.opt_state
        for step in range(slots):
            params, moments, metrics = one(params, moments, step)
            jax.device_get(metrics)

    def dispatch() -> None:
        new = jax.tree.map(jnp.copy, state)
        jax.device_get(trainer.advance(new, ahead, np.int32(slots), np.arange(slots, dtype=np.int32), True))

    return ratio(interleave({"loop": loop, "dispatch": dispatch}, rounds), "loop", "dispatch")


def measure_recording(rounds: int) -> dict[str, float]:
    """Time of a run of the default config over that of one without records of batches, and without the probe too."""
    arm = build_arms(build_comparison({}))["tied"]
    full = Schedule.of(arm.config)

    def run(schedule: Schedule) -> Run:
        def go() -> None:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / "run"
                train_run(arm.trainer, arm.config, arm.stream, place, threading.Event(), lambda _: None, schedule)

        return go

    without = dataclasses.replace(full, rows=[])
    runs = {"on": run(full), "rows": run(without), "rows and probe": run(dataclasses.replace(without, probes=[]))}
    times = interleave(runs, rounds)
    return {name: ratio(times, "on", name) for name in ("rows", "rows and probe")}


def measure_history() -> float:
    """Seconds to read one token's history out of 1,000 records of 50,000 rows."""
    rows, rng = 50_000, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        log = RowLog(Path(folder) / "rows.zarr", {"lookup": {}}, {"frequency": np.ones(rows)}, 0)
        for step in range(1000):
            log.append(step, {"lookup": rng.random(rows, np.float32)})
        log.flush()
        seconds = []
        for token in range(7):
            start = time.perf_counter()
            np.asarray(xr.open_zarr(Path(folder) / "rows.zarr")["lookup"].sel(token=token * 7000))
            seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def measure_start() -> dict[str, float]:
    """Seconds from the command to the end of a run of one update, and of --help. Compiled programs are cached."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        one = ["--config.train.steps=1", "--config.optimizer.warmup_steps=0"]
        for name, arguments in {"compile": one, "start": one, "help": ["--help"]}.items():
            start = time.perf_counter()
            command = [sys.executable, "-m", "tied_lm.cli", "train", f"--workdir={folder}/{name}", *arguments]
            subprocess.run(command, check=True, capture_output=True)
            seconds[name] = time.perf_counter() - start
    return {"first start": seconds["start"], "help": seconds["help"]}


def main(arguments: list[str], _: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # there is nothing to save
    parser = Parser(description="Measure speed and memory; writes benchmark.json here.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each measurement (default: %(default)s)")
    rounds = parser.parse_args(arguments).rounds
    with_torch = importlib.util.find_spec("torch") is not None
    if not with_torch:
        print("PyTorch is not installed (extra `bench`), so it is left out", file=sys.stderr)
    set_up_jax()
    shapes = []
    for shape in SHAPES:
        print(f"V, D, N = {shape}", file=sys.stderr)
        shapes.append(measure_shape(shape, rounds * (5 if shape.vocab_size < 1000 else 1), with_torch))
    print("dispatch, recording, start, growth", file=sys.stderr)
    found: dict[str, Any] = {
        "shapes": shapes,
        "dispatch / loop": measure_dispatch(5 * rounds),
        "recording on / off": measure_recording(rounds),
        "seconds": measure_start(),
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
    print(f"  {found['history, ms']:.0f} ms  to read one token's history from 1,000 records of 50,000 rows")
    print(f"  {found['growth in V']:.2f}   log-log slope of the time of a step in V, {GROWTH[0]:,} to {GROWTH[-1]:,}")
    print(f"  {found['seconds']['first start']:.1f} s  from command to the end of a run of one update")
    print(f"  {found['seconds']['help']:.1f} s  --help")
