"""The benchmark of runs in this process: many updates to a dispatch, what recording costs, what compiles."""

import dataclasses
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from tied_lm.cli.rounds import Run, interleave, ratio
from tied_lm.config import build_comparison, completed, defaults, override
from tied_lm.model.split import loss_and_gradients
from tied_lm.record.history import RowLog
from tied_lm.study.plan import Arm, build_arms
from tied_lm.train.calendar import Schedule
from tied_lm.train.loop import train_run

# Of fields whose values are arguments of the programs, one after the other changed from what it was before.
CHANGES = {"optimizer.learning_rate": "0.01", "optimizer.clip_norm": "2", "optimizer.weight_decay": "0.2", "seed": "7"}


def tied_arm(fields: dict[str, str]) -> Arm:
    """The tied arm of the default comparison, with some fields changed."""
    values = completed({}, defaults())
    for field, value in fields.items():
        override(values, field, value)
    return build_arms(build_comparison(values))["tied"]


def run_once(arm: Arm, schedule: Schedule | None = None) -> None:
    """A whole run in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        stream = arm.stream.with_seed(arm.config.seed)
        train_run(arm.trainer, arm.config, stream, Path(folder) / "run", threading.Event(), lambda _: None, schedule)


def count_compilations() -> dict[str, int]:
    """Programs that a run compiles when a field has another value than in the run before, by field."""
    fields = {"train.steps": "60", "optimizer.name": "adamw", "optimizer.clip_norm": "1"}
    fields |= {"optimizer.weight_decay": "0.1", "model.body": "mlp"}
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    run_once(tied_arm(fields))
    counts = {}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for field, value in CHANGES.items():
            fields |= {field: value}
            run_once(tied_arm(fields))
            counts[field] = len(compiled)
            compiled.clear()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return counts


def measure_dispatch(rounds: int) -> float:
    """Updates per second with the split recorded at every step, over those of a loop that fetches each step's."""
    sizes = {"data.vocab_size": 64, "model.features": 16, "data.batch_size": 4, "data.length": 64}
    arm = tied_arm({field: str(value) for field, value in sizes.items()})
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
    arm = tied_arm({})
    full = Schedule.of(arm.config)

    without = dataclasses.replace(full, rows=[], every_row=[])
    schedules = {"on": full, "rows": without, "rows and probe": dataclasses.replace(without, probes=[])}
    runs: dict[str, Run] = {name: partial(run_once, arm, schedule) for name, schedule in schedules.items()}
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
