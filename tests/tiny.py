"""Runs so small that a test can do many."""

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from configs import toy
from tied_lm import bands
from tied_lm.config import Config, build_run, override
from tied_lm.record.scalars import read_metrics
from tied_lm.study.plan import Plan
from tied_lm.train.build import build_stream
from tied_lm.train.checkpoint import Checkpoints
from tied_lm.train.loop import train_run
from tied_lm.train.step import Trainer, TrainState

# Checkpoints at 9 and 27 lie off the grid of the evaluations, those at 18, 36 and 39 on it; neither 23 held-out tokens
# nor 17 probe tokens fill whole batches.
FIELDS = [
    "data.vocab_size=20",
    "data.classes=4",
    "data.batch_size=2",
    "data.length=5",
    "data.eval_tokens=23",
    "model.features=4",
    "optimizer.learning_rate=0.05",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=3",
    "train.steps=39",
    "train.eval_every=6",
    "log.scalars_every=5",
    "log.rows_every=8",
    "log.probe_tokens=17",
    "checkpoint.every=9",
]
LETTERS = bytes(range(65, 91)) * 8
ROW_STEPS = [0, 1, 2, 4, 8, 16, 24, 32, 39]
EVALUATION_STEPS = [0, 6, 12, 18, 24, 30, 36, 39]
SCALAR_STEPS = [0, 5, 10, 15, 20, 25, 30, 35, 39]
SHOWN_PREDICTIONS = [f"predictions/{field}" for field in ("calibration_error", "column_space_share")]
PROBE_STEPS = [0, 1, 2, 3, 4, 6, 9, 13, 19, 27, 39]

# These draw dropout masks, or carry a state.
SEQUENCE_ARMS = {
    "transformer, dropout, muon": (
        "model.body=transformer",
        "body.heads=2",
        "body.dropout=0.2",
        "optimizer.name=muon",
        "optimizer.vocab_learning_rate=0.02",
    ),
    "stateful lstm, dropout, coupled adam": (
        "model.body=lstm",
        "body.depth=2",
        "body.dropout=0.2",
        "body.stateful=true",
        "data.order=contiguous",
        "optimizer.name=coupled_adam",
    ),
}


def make_config(*overrides: str) -> Config:
    values = toy.get_config().to_dict()
    for text in (*FIELDS, *overrides):
        override(values, *text.split("="))
    return build_run(values)


def new_trainer(config: Config) -> Trainer:
    return Trainer(config, bands.bands_of(build_stream(config).frequencies))


_trainers: dict[Config, Trainer] = {}


def trainer_of(config: Config) -> Trainer:
    """One trainer for all tests and for all configs with the same programs, so that these are compiled once."""
    plain = make_config()
    key = dataclasses.replace(
        config,
        seed=0,
        data=dataclasses.replace(config.data, paths=(), heldout_paths=()),
        train=dataclasses.replace(plain.train, steps=config.train.steps),
        log=plain.log,
        checkpoint=plain.checkpoint,
    )
    if key not in _trainers:
        _trainers[key] = new_trainer(config)
    return _trainers[key]


def plan_of(values: Mapping[str, Any]) -> Plan:
    """The plan of a comparison whose arms have the trainers that all tests share."""
    plan = Plan.of(values)
    arms = {name: dataclasses.replace(arm, trainer=trainer_of(arm.config)) for name, arm in plan.arms.items()}
    return dataclasses.replace(plan, arms=arms)


def train(place: Path, config: Config, stop_after: int | None = None, trainer: Trainer | None = None) -> None:
    """Train in a folder; with `stop_after`, ask for a stop once so many updates are written down."""
    stop = threading.Event()
    done = 0

    def progress(updates: int) -> None:
        nonlocal done
        done += updates
        if stop_after is not None and done >= stop_after:
            stop.set()

    train_run(trainer or trainer_of(config), config, build_stream(config), place, stop, progress)


def write_letters(folder: Path, *overrides: str) -> Config:
    """The config of a text of few letters, whose held-out part is less than one batch."""
    path = folder / "letters.txt"
    path.write_bytes(LETTERS)
    fields = (f"data.paths={path}", "data.source=text", "data.vocab_size=100", "data.batch_size=8")
    return make_config(*fields, "data.heldout_fraction=0.1", *overrides)


def sequences(folder: Path, name: str, *overrides: str) -> Config:
    """The config of a sequence arm on letters, half of which are held out."""
    return write_letters(folder, "data.heldout_fraction=0.5", *SEQUENCE_ARMS[name], *overrides)


def slots(trainer: Trainer, steps: list[int]) -> np.ndarray:
    return np.array(steps + [-1] * (trainer.slots - len(steps)), np.int32)


@functools.cache
def trajectory(config: Config) -> list[TrainState]:
    """The states after 0, 1, 2, ... updates, one past the last step included."""
    trainer, stream = trainer_of(config), build_stream(config)
    state = trainer.init(np.uint32(config.seed))
    states = [jax.device_get(state)]
    for step in range(config.train.steps + 1):
        state, _ = trainer.advance(state, stream.ahead(step, 1), np.int32(1), slots(trainer, []), step == 0)
        states.append(jax.device_get(state))
    return states


def assert_same_bits(a: Any, b: Any) -> None:
    leaves = [jax.tree_util.tree_leaves_with_path(jax.device_get(tree)) for tree in (a, b)]
    assert [path for path, _ in leaves[0]] == [path for path, _ in leaves[1]]
    for (path, x), (_, y) in zip(*leaves, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), path


def saved_state(place: Path, config: Config) -> TrainState | None:
    checkpoints = Checkpoints(place / "checkpoints", config.checkpoint.keep)
    try:
        return checkpoints.restore(trainer_of(config).init(np.uint32(config.seed)))
    finally:
        checkpoints.close()


def metrics(place: Path) -> list[dict[str, Any]]:
    """The lines of the metrics without what may differ between two identical runs."""
    return [{tag: v for tag, v in line.items() if not tag.startswith("time/")} for line in read_metrics(place)]


def dataset(path: Path) -> dict[str, np.ndarray]:
    with xr.open_zarr(path) as opened:
        return {str(name): np.asarray(opened[name]) for name in opened.variables}


def accumulate(place: Path) -> EventAccumulator:
    """The run as TensorBoard reads it, without its sampling."""
    return EventAccumulator(str(place), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def board_events(place: Path) -> list[Any]:
    """All events that hold summaries; the checksums are verified."""
    return [
        event
        for path in sorted(place.glob("events.out.tfevents.*"))
        for event in LegacyEventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]


def board_values(place: Path) -> dict[tuple[str, int], Any]:
    """What TensorBoard holds by tag and step, without times; each must stand there once."""
    values = [(value.tag, event.step, value) for event in board_events(place) for value in event.summary.value]
    repeated = [key for key, n in Counter((tag, step) for tag, step, _ in values).items() if n > 1]
    assert not repeated
    return {(tag, step): value.SerializeToString() for tag, step, value in values if not tag.startswith("time/")}


def board_tag(tag: str, strings: Mapping[str, str] = {}) -> str:
    """What TensorBoard calls a scalar of metrics.jsonl: groups in the order of importance."""
    if tag.startswith("hypothetical/"):
        return "untied_" + tag
    if tag.startswith("band/") and tag.endswith("/loss"):
        return f"loss/of_band/{tag.split('/')[1]}"
    if "token/" in tag:
        name, field = tag.split("/")[-2:]
        return f"rows_followed/{name} {strings[name]}/{field}" if name in strings else f"rows_followed/{name}/{field}"
    if tag.startswith("geometry/"):
        return f"rows_{tag}"
    if tag.startswith("predictions/"):
        return f"probe_{tag}"
    batch = tag.startswith(("grad_norm/", "split/", "band/", "rows_zero/", "rows_nonfinite", "optimizer/"))
    return f"single_batch/{tag}" if batch else tag


def is_aside(tag: str) -> bool:
    """Whether metrics.jsonl alone keeps a scalar: norms of a single batch, where the probe has the same with less
    noise, and of geometry and predictions what is not among the few that say most."""
    parts = tag.removeprefix("hypothetical/").split("/")
    if parts[0] == "geometry":
        return "band" in parts or parts[-1] in ("participation_ratio", "isotropy", "distance_to_start")
    if parts[0] == "predictions":
        return tag not in SHOWN_PREDICTIONS
    return parts[0] == "token" or (parts[0] == "band" and parts[-1] not in ("loss", "share", "cosine"))


def assert_same_run(a: Path, b: Path, config: Config) -> None:
    """Two finished folders hold the same, bit for bit."""
    assert (a / "config.json").read_bytes() == (b / "config.json").read_bytes()
    assert metrics(a) == metrics(b)
    for name in ("rows.zarr", "probe.zarr", "heldout.zarr"):
        assert_same_bits(dataset(a / name), dataset(b / name))
    assert_same_bits(saved_state(a, config), saved_state(b, config))
    assert board_values(a) == board_values(b)
