"""What a comparison will need, before anything of it is written."""

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from tied_lm.model.embedding import count_parameters
from tied_lm.study.plan import Arm
from tied_lm.train import evaluation as programs
from tied_lm.train.calendar import Schedule
from tied_lm.train.resources import shown

SECONDS = 0.5  # of updates that are timed
HEAD = ["arm", "parameters", "updates", "memory", "disk", "start", "time"]


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def seconds_of(arm: Arm) -> tuple[float, float]:
    """Seconds of the start of an arm's first run, which compiles, and of a run after it, as far as some updates, and
    one batch of an evaluation and of the probe, tell. Nothing is written."""
    config, trainer, stream, layout = arm.config, arm.trainer, arm.stream, arm.trainer.model.layout
    schedule, record_at = Schedule.of(config), np.full(trainer.slots, -1, np.int32)
    state = trainer.init(np.uint32(config.seed))

    def update(count: int) -> object:
        nonlocal state
        state, records = trainer.advance(state, stream.ahead(0, count, layout), np.int32(count), record_at, True)
        return records

    start, once = _timed(lambda: update(1)), _timed(lambda: update(1))
    count = int(min(max(1, SECONDS // once), config.train.steps, stream.most_updates))
    seconds = schedule.steps * _timed(lambda: update(count)) / count
    batch = config.data.batch_size * config.data.length
    heldout = stream.heldout_ahead(max(config.data.eval_tokens, config.log.probe_tokens), layout)
    parts: Mapping[str, tuple[Callable[..., object], int, list[int]]] = {
        "evaluation": (programs.evaluate, config.data.eval_tokens, schedule.evaluations),
        "probe": (programs.probe, config.log.probe_tokens, schedule.probes),
    }
    for program, wanted, steps in parts.values():
        tokens = int(min(wanted, stream.heldout_tokens))
        one = int(min(batch, tokens))
        start += _timed(lambda: program(trainer, state.params, heldout, one))  # noqa: B023
        seconds += len(steps) * tokens / one * _timed(lambda: program(trainer, state.params, heldout, one))  # noqa: B023
    return start, seconds


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or as hours."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 120 else f"{minutes / 60:,.3g} h"


def needs(arms: Mapping[str, Arm], seeds: int) -> tuple[list[list[str]], float]:
    """One row for each arm, of all its runs, below `HEAD`; and the seconds of all, without writing and pictures."""
    rows, total = [HEAD], 0.0
    for name, arm in arms.items():
        start, run = seconds_of(arm)
        memory = arm.trainer.peak_bytes(arm.stream.ahead(0, 1, arm.trainer.model.layout))
        cells = [f"{count_parameters(arm.trainer.model)['total']:,}", f"{arm.config.train.steps:,}"]
        cells += ["-" if memory is None else shown(memory), shown(seeds * arm.disk_bytes())]
        rows.append([name, *cells, clock(start), clock(seeds * run)])
        total += start + seeds * run
    return rows, total
