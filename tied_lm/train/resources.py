"""What a run needs of the machine, and what the machine has."""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from tied_lm.bands import NAMES
from tied_lm.checks import ConfigError
from tied_lm.config import Config, to_dict
from tied_lm.model.mesh import DATA, VOCAB
from tied_lm.record.histogram import BINS
from tied_lm.record.history import STEPS_IN_CHUNK, files_of
from tied_lm.rows import DRIFT, PARTS, RowStats, shown_by_group
from tied_lm.train.build import build_mesh
from tied_lm.train.calendar import Schedule

if TYPE_CHECKING:
    from tied_lm.train.step import Trainer

# Matrices of the vocabulary's size that each optimizer keeps.
MOMENTS = {"sgd": 0, "momentum": 1, "coupled_adam": 1}
CLUSTER = 4096  # bytes that the smallest file or folder takes
SCALAR = 160  # bytes of one scalar in metrics.jsonl and in TensorBoard's events, its tag twice among them
BANDS = len(NAMES)
# Of the whole and of each band; and what a record of rows has besides.
SPLIT_SCALARS = (len(shown_by_group(RowStats._fields)) + 5) * (1 + BANDS)


def shown(size: float) -> str:
    """A number of bytes."""
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 1000 or unit == "TB":
            break
    return f"{size:,.3g} {unit}"


def memory_bytes(config: Config) -> dict[str, int]:
    """What one run needs at least, by the field that decides about it. Nothing is built."""
    model, body, data = config.model, config.body, config.data
    width = config.scheme["factor_features"] if model.tying == "factorised" else model.features
    matrices = 2 if model.tying in ("untied", "late_untie") else 1
    # The matrices, those of step 0, what the optimizer keeps, and the four tables of one batch and of the probe's sum.
    tables = matrices * (2 + MOMENTS.get(config.optimizer.name, 2)) + 8
    positions = data.batch_size * data.length
    # Ids, targets, and hidden vectors with their gradient.
    batch = positions * (8 * model.features + 8)
    if model.body != "none":
        blocks = 1 if body["remat"] else body["depth"]  # kept for the backward pass
        batch += positions * blocks * 8 * (body["width"] or model.features)
        if model.body == "transformer":
            batch += positions * blocks * 8 * body["heads"] * data.length  # attention, before and after its softmax
    squares = 0
    if model.body != "none" or model.tying in ("projection", "spd_pair"):
        squares = 8 * model.features**2  # a matrix and its gradient
    return {
        # Beside the tables the host has a text and a frequency for each row.
        "data.vocab_size": data.vocab_size * (4 * width * tables + 100),
        "data.batch_size" if data.batch_size > data.length else "data.length": batch,
        "model.features": squares,
        "data.eval_tokens": 48 * (data.eval_tokens // data.length),  # sums by sequence and band
    }


def check_memory(config: Config) -> None:
    """Refuse a run that cannot fit, before anything of its size is made.

    Raises:
        ConfigError: it names the field that needs most of the memory.
    """
    needed, present = memory_bytes(config), memory_of_machine()
    mesh = build_mesh(config)
    if mesh is not None and _own_memory():
        batch = "data.batch_size" if "data.batch_size" in needed else "data.length"
        needed["data.vocab_size"] //= mesh.shape[VOCAB]
        needed[batch] //= mesh.shape[DATA]
    total = sum(needed.values())
    if total > present:
        field = max(needed, key=lambda name: needed[name])
        group, _, name = field.partition(".")
        raise ConfigError(
            field,
            getattr(getattr(config, group), name),
            f"what fits the memory; the run needs at least {shown(total)}, and there are {shown(present)}",
        )


def check_sampling(config: Config, count: int, width: int) -> None:
    """Refuse samples, each token of which is scored with `width` tokens, that cannot fit.

    Raises:
        ConfigError: with both figures.
    """
    heads = config.body["heads"] if config.model.body == "transformer" else 0
    needed = count * (width * (4 * config.model.features + 4 + 4 * heads * width) + 8 * config.data.vocab_size)
    present = memory_of_machine()
    if needed > present:
        raise ConfigError(
            "samples",
            count,
            f"what fits the memory; with {width:,} tokens before each one that is scored they need at least "
            f"{shown(needed)}, and there are {shown(present)}",
        )


def _own_memory() -> int:
    """Bytes of memory of a device; 0 if it uses that of the machine, or does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def memory_of_machine() -> int:
    """Bytes of memory of the device that trains, as far as it says; else of the machine or its container."""
    limits = [_own_memory() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits)


def disk_bytes(trainer: "Trainer", token_strings: Sequence[str]) -> int:
    """What the folder of one run takes at most."""
    config, model = trainer.config, trainer.model
    schedule = Schedule.of(config)
    vocab_size, parts = config.data.vocab_size, len(model.push_parts)

    def arrays(records: int, fields: int, size: int) -> int:
        """A zarr group: its records, what it says of each row, and its metadata, once more while they are replaced."""
        files = files_of(size)[0]
        blocks = records // STEPS_IN_CHUNK + 1  # each a file, in a folder perhaps
        values = (fields + 1) * (4 * size * records + 2 * CLUSTER * files * min(records, blocks))
        # The open block, and the chunk that is written in its place.
        values += 2 * (fields + 2) * (4 * size * min(records, STEPS_IN_CHUNK) + CLUSTER)
        described = 3 * (8 * size + 2 * CLUSTER * files) + (fields + 4) * 3 * CLUSTER
        strings = sum(len(json.dumps(text)) + 2 for text in token_strings)
        return values + described + 3 * strings + 2 * CLUSTER

    stats = len(RowStats._fields) + parts
    rows = arrays(len(schedule.every_row), stats + 2 * len(model.vocabulary), vocab_size)
    probes = arrays(len(schedule.probes), stats + len(DRIFT) * len(model.vocabulary), vocab_size)

    curves = len(PARTS) * (3 + len(config.log.tokens))
    scalars = len(schedule.scalars) * 20 + len(schedule.evaluations) * (10 + BANDS)
    scalars += (len(schedule.rows) + len(schedule.probes)) * (SPLIT_SCALARS + (1 + BANDS) * parts + 20)
    scalars += len(schedule.probes) * (2 + (8 + 2 * BANDS) * len(model.vocabulary))
    scalars += len(schedule.rows) * (curves + 2 * len(model.others))
    histograms = len(schedule.rows) * len(PARTS) * (20 * BINS + 200)
    batches = -(-config.data.eval_tokens // (config.data.batch_size * config.data.length))
    losses = arrays(len(schedule.evaluations), 2 * BANDS + 2, batches * config.data.batch_size)

    tables = len(model.vocabulary) * (4 * vocab_size * model.row_width + 2 * CLUSTER) if config.log.matrices else 0

    about = len(json.dumps(to_dict(config))) * 3 + 8 * CLUSTER  # config.json, and in events and checkpoints
    state = jax.eval_shape(trainer.init, 0)
    leaves = jax.tree.leaves(state)
    checkpoint = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    checkpoint += checkpoint // 50 + 24 * CLUSTER + 1024 * len(leaves) + about
    # The newest, the best, one that is being written and one that is not yet removed.
    saved = min(len(schedule.checkpoints), config.checkpoint.keep + 3)
    return (
        rows
        + probes
        + tables * len(schedule.probes)
        + scalars * SCALAR
        + histograms
        + losses
        + about
        + saved * checkpoint
    )


def summary_bytes(config: Config, arms: int, seeds: int) -> int:
    """What a comparison's folder takes at most beside its runs: config.json, summary.json, the pages."""
    schedule = Schedule.of(config)
    points = len(schedule.evaluations) + len(schedule.probes) + len(schedule.rows)
    page = 100_000 + 600 * points + 150 * len(PARTS) * min(config.data.vocab_size, 2000)
    # The page of every row has a library in it, which is 0.9 MB.
    rows = 1_300_000 + config.data.vocab_size * (100 + 40 * arms) + 110_000 * arms
    numbers = 40 * seeds * (4 * BANDS + 16)
    shown = min(config.data.vocab_size, 10_000)  # rows in TensorBoard's projector, of up to two matrices
    board = 10 * 150_000 + shown * (300 + 28 * config.model.features) + 2 * CLUSTER * (seeds + 6)  # and heat maps
    board += 2000 * (len(schedule.evaluations) + len(schedule.probes)) * (BANDS + 2)
    # All twice while they are replaced.
    return 2 * (200_000 + rows + arms * (page + numbers + board + 8192))


def check_disk(place: Path, needed: int) -> None:
    """Refuse a folder on a disk with less space than a run may take.

    Raises:
        ConfigError: with both figures.
    """
    there = place.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            "workdir", str(place), f"a folder on a disk with {shown(needed)} free; there are {shown(free)}"
        )
