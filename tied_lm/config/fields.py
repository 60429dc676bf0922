"""The config as frozen dataclasses with their defaults, built once at the boundary and checked there."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from tied_lm.checks import (
    ConfigError,
    Options,
    at_least,
    at_most,
    below_one,
    build,
    countable,
    default_options,
    fraction,
    not_negative,
    one_of,
    open_fraction,
    positive,
    rows,
    seed32,
    wide,
)
from tied_lm.config.values import completed, resolved

MOST_RECORDS = 2**20  # of one kind in a run
MOST_TOKENS = 100  # to follow as curves
MOST_SEEDS = 10_000
# Of what a config means, entered in config.json. It grows when the same fields come to mean something else: older
# folders can be read, but not continued. Those that say nothing are of version 1. A new field needs no new version: its
# default is what was done before there was the field.
VERSION = 2

NONE_YET = Options({})  # gathered from the classes that take them
TIED_AND_UNTIED = Options({"tied": "model.tying=tied", "untied": "model.tying=untied"})


@dataclasses.dataclass(frozen=True)
class Model:
    tying: str = "tied"
    features: Annotated[int, at_least(1), wide] = 32
    body: str = "none"
    compute_dtype: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    init_std: Annotated[float, positive] = 0.02
    scale_input: bool = False
    matmul_precision: Annotated[str, one_of("exact", "fast")] = "exact"
    block_tokens: Annotated[int, at_least(0), countable] = 0


@dataclasses.dataclass(frozen=True)
class Data:
    source: str = "toy"
    seed: Annotated[int, seed32] = 0
    vocab_size: Annotated[int, rows, countable] = 256
    batch_size: Annotated[int, at_least(1), countable] = 32
    length: Annotated[int, at_least(1), countable] = 64
    eval_tokens: Annotated[int, at_least(1), countable] = 65_536
    reversibility: Annotated[float, fraction] = 1.0
    classes: Annotated[int, at_least(1), countable] = 16
    zipf_exponent: Annotated[float, not_negative, at_most(10)] = 1.0
    tokenizer: str = "bytes"
    min_count: Annotated[int, at_least(1), countable] = 1
    bin_dtype: Annotated[str, one_of("uint16", "uint32", "int64")] = "uint16"
    paths: tuple[str, ...] = ()
    heldout_paths: tuple[str, ...] = ()
    heldout_fraction: Annotated[float, open_fraction] = 0.1
    order: Annotated[str, one_of("random", "contiguous")] = "random"


@dataclasses.dataclass(frozen=True)
class Loss:
    z: Annotated[float, not_negative, at_most(100)] = 0.0  # of the squared log-sum-exp in training, nats


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: Annotated[str, one_of("adam", "adamw", "sgd", "momentum", "muon", "coupled_adam")] = "adam"
    learning_rate: Annotated[float, positive] = 0.02
    vocab_learning_rate: Annotated[float, not_negative] = 0.0
    schedule: Annotated[str, one_of("constant", "cosine", "wsd")] = "cosine"
    warmup_steps: Annotated[int, at_least(0), countable] = 50
    decay_steps: Annotated[int, at_least(0), countable] = 0
    beta1: Annotated[float, below_one] = 0.9
    beta2: Annotated[float, below_one] = 0.999
    weight_decay: Annotated[float, not_negative] = 0.0
    vocab_weight_decay: Annotated[float, not_negative] = 0.0
    clip_norm: Annotated[float, not_negative] = 0.0


@dataclasses.dataclass(frozen=True)
class Train:
    steps: Annotated[int, at_least(1), countable] = 1000
    eval_every: Annotated[int, at_least(1), countable] = 100


@dataclasses.dataclass(frozen=True)
class Log:
    scalars_every: Annotated[int, at_least(1), countable] = 50
    rows_every: Annotated[int, at_least(1), countable] = 64
    probe_tokens: Annotated[int, at_least(1), countable] = 32_768
    tokens: tuple[int, ...] = ()
    writers: tuple[str, ...] = ("tensorboard",)
    matrices: bool = False


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every: Annotated[int, at_least(1), countable] = 500
    keep: Annotated[int, at_least(1), countable] = 2


@dataclasses.dataclass(frozen=True)
class Mesh:
    data: Annotated[int, at_least(0), countable] = 1
    vocab: Annotated[int, at_least(0), countable] = 1
    body: Annotated[str, one_of("replicated", "sharded")] = "replicated"
    distributed: bool = False
    coordinator: str = ""
    processes: Annotated[int, at_least(0), countable] = 0
    process: Annotated[int, at_least(-1), countable] = -1


@dataclasses.dataclass(frozen=True)
class Compare:
    """The arms of a comparison, each with its overrides, and what is asked of them; no run depends on it."""

    arms: Options = TIED_AND_UNTIED
    baseline: str = "untied"
    seeds: Annotated[int, at_least(1), at_most(MOST_SEEDS)] = 5
    match: Annotated[str, one_of("width", "parameters", "depth")] = "width"
    margin: Annotated[float, positive, at_most(100)] = 0.01  # nats a token: a smaller difference does not matter


@dataclasses.dataclass(frozen=True)
class Config:
    """What one run depends on."""

    seed: Annotated[int, seed32] = 0
    model: Model = Model()
    scheme: Options = NONE_YET
    body: Options = NONE_YET
    data: Data = Data()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    log: Log = Log()
    checkpoint: Checkpoint = Checkpoint()
    mesh: Mesh = Mesh()

    def __post_init__(self) -> None:
        if len(self.log.tokens) > MOST_TOKENS or len(set(self.log.tokens)) < len(self.log.tokens):
            raise ConfigError("log.tokens", self.log.tokens, f"at most {MOST_TOKENS} ids, each once")
        if not self.data.vocab_size:
            allowed = "at least 2; 0, for all that a text has, is resolved by the commands train, compare and sweep"
            raise ConfigError("data.vocab_size", 0, allowed + ", with data.source = 'text'")
        for token in self.log.tokens:
            if not 0 <= token < self.data.vocab_size:
                raise ConfigError(
                    "log.tokens", token, f"ids from 0 to data.vocab_size - 1 = {self.data.vocab_size - 1}"
                )
        optimizer, steps = self.optimizer, self.train.steps
        if self.data.batch_size * self.data.length > 10**9:
            raise ConfigError(
                "data.batch_size", self.data.batch_size, f"at most 10**9 / data.length = {10**9 // self.data.length:,}"
            )
        gaps = {
            "train.eval_every": self.train.eval_every,
            "log.scalars_every": self.log.scalars_every,
            "log.rows_every": self.log.rows_every,
            "checkpoint.every": self.checkpoint.every,
        }
        for field, gap in gaps.items():
            if steps > MOST_RECORDS * gap:
                least = -(-steps // MOST_RECORDS)
                raise ConfigError(field, gap, f"at least {least:,}, so that there are at most {MOST_RECORDS:,} of them")
        if optimizer.name not in ("adamw", "muon"):
            for field in ("weight_decay", "vocab_weight_decay"):
                if getattr(optimizer, field):
                    raise ConfigError(
                        f"optimizer.{field}", getattr(optimizer, field), "0, unless optimizer.name = 'adamw' or 'muon'"
                    )


def _check_schedule(config: Config) -> None:
    """Refuse a schedule of the learning rate that never does what its fields say."""
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.schedule == "wsd" and not optimizer.decay_steps:
        raise ConfigError("optimizer.decay_steps", 0, "at least 1 with optimizer.schedule = 'wsd', or it never decays")
    if optimizer.schedule != "wsd" and optimizer.decay_steps:
        raise ConfigError("optimizer.decay_steps", optimizer.decay_steps, "0, unless optimizer.schedule = 'wsd'")
    if optimizer.decay_steps > steps:
        raise ConfigError("optimizer.decay_steps", optimizer.decay_steps, f"at most train.steps = {steps}")
    # The first update after the warm-up has the full rate, and so has the first of the decay.
    rest, words = (optimizer.decay_steps, "optimizer.decay_steps") if optimizer.decay_steps else (1, "1")
    if optimizer.warmup_steps > steps - rest:
        raise ConfigError(
            "optimizer.warmup_steps",
            optimizer.warmup_steps,
            f"at most train.steps - {words} = {steps - rest}, so that the rate is reached",
        )


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values of a dataclass, as JSON holds them (lists for tuples)."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=dict))


OWN_DEFAULTS = to_dict(Config()) | {"compare": to_dict(Compare())}  # those of this file
OPTIONS = ("scheme", "body")  # groups whose fields are declared by the classes that take them


@functools.cache
def option_defaults(group: str) -> dict[str, Any]:
    """The options that all schemes or all bodies take, with their defaults."""
    # Not at the top, so that --help and most mistakes are answered before the libraries are loaded.
    from tied_lm.model.bodies import BODIES, Body
    from tied_lm.model.embedding import VocabularyModel
    from tied_lm.model.schemes import SCHEMES

    if group == "scheme":
        return default_options(SCHEMES.values(), VocabularyModel)
    return default_options([kind for kind in BODIES.values() if kind is not None], Body)


def defaults() -> dict[str, Any]:
    """Every field of every group with its default, `compare` included, as nested plain values."""
    return OWN_DEFAULTS | {group: option_defaults(group) for group in OPTIONS}


def read_data(values: Mapping[str, Any]) -> Data:
    """The group `data` of nested values, whose vocabulary may still be 0."""
    return build(Data, resolved(values).get("data", {}), "data.")


def read_mesh(values: Mapping[str, Any]) -> Mesh:
    """The group `mesh` of nested values.

    Raises:
        ConfigError: a field says where the other processes are, and there are none; or there is no such process.
    """
    mesh, usual = build(Mesh, resolved(values).get("mesh", {}), "mesh."), Mesh()
    for name in ("coordinator", "processes", "process"):
        value = getattr(mesh, name)
        if value != getattr(usual, name) and not mesh.distributed:
            raise ConfigError(f"mesh.{name}", value, f"{getattr(usual, name)!r}, unless mesh.distributed = True")
    if mesh.coordinator and not re.fullmatch(r"\S+:\d{1,5}", mesh.coordinator):
        raise ConfigError("mesh.coordinator", mesh.coordinator, "a host and a port, HOST:PORT")
    if mesh.processes and mesh.process >= mesh.processes:
        raise ConfigError("mesh.process", mesh.process, f"below mesh.processes = {mesh.processes}")
    return mesh


def read_run(values: Mapping[str, Any]) -> Config:
    """The config of a run that is there already, from nested values: one that would not be started today, perhaps. A
    field that is missing, since the run was made before there was one, has its default."""
    known = completed(values, defaults())
    return build(Config, {name: value for name, value in known.items() if name != "compare"})


def build_run(values: Mapping[str, Any]) -> Config:
    """The config of one run from nested values; `compare`, which a run does not depend on, is left out."""
    config = read_run(resolved(values))
    _check_schedule(config)
    return config
