"""The config as frozen dataclasses, built once at the boundary and checked there."""

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from ml_collections import FieldReference

from tied_lm.checks import (
    ConfigError,
    Options,
    at_least,
    at_most,
    below_one,
    build,
    convert,
    countable,
    fraction,
    not_negative,
    one_of,
    open_fraction,
    positive,
    rows,
    seed32,
    wide,
)

MOST_RECORDS = 2**20  # of one kind in a run
MOST_TOKENS = 100  # to follow as curves
MOST_SEEDS = 10_000
MOST_ARMS = 100
RESERVED = ("mean", "hypothetical")  # names of what stands beside the arms
ARM_NAMES = (
    f"at most 64 letters, digits, - and _, the first a letter or digit; {' and '.join(RESERVED)} have another meaning"
)
# Of what a config means, entered in config.json. It grows when the same fields come to mean something else: older
# folders can be read, but not continued. Those that say nothing are of version 1.
VERSION = 2

COMPARE = ("arms", "baseline", "seeds", "match", "margin")  # the fields of the group `compare`, on which no run depends
# What an arm may set. All else is shared: on other tokens, seeds or probes its numbers could not be paired.
OF_AN_ARM = ("model.", "scheme.", "body.", "optimizer.", "train.steps")


@dataclasses.dataclass(frozen=True)
class Model:
    tying: str
    features: Annotated[int, at_least(1), wide]
    body: str
    compute_dtype: Annotated[str, one_of("float32", "bfloat16")]
    init_std: Annotated[float, positive]
    scale_input: bool


@dataclasses.dataclass(frozen=True)
class Data:
    source: str
    seed: Annotated[int, seed32]
    vocab_size: Annotated[int, rows, countable]
    batch_size: Annotated[int, at_least(1), countable]
    length: Annotated[int, at_least(1), countable]
    eval_tokens: Annotated[int, at_least(1), countable]
    reversibility: Annotated[float, fraction]
    classes: Annotated[int, at_least(1), countable]
    zipf_exponent: Annotated[float, not_negative, at_most(10)]
    tokenizer: str
    min_count: Annotated[int, at_least(1), countable]
    bin_dtype: Annotated[str, one_of("uint16", "uint32", "int64")]
    paths: tuple[str, ...]
    heldout_paths: tuple[str, ...]
    heldout_fraction: Annotated[float, open_fraction]
    order: Annotated[str, one_of("random", "contiguous")]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: Annotated[str, one_of("adam", "adamw", "sgd", "momentum", "muon", "coupled_adam")]
    learning_rate: Annotated[float, positive]
    vocab_learning_rate: Annotated[float, not_negative]
    schedule: Annotated[str, one_of("constant", "cosine", "wsd")]
    warmup_steps: Annotated[int, at_least(0), countable]
    decay_steps: Annotated[int, at_least(0), countable]
    beta1: Annotated[float, below_one]
    beta2: Annotated[float, below_one]
    weight_decay: Annotated[float, not_negative]
    vocab_weight_decay: Annotated[float, not_negative]
    clip_norm: Annotated[float, not_negative]


@dataclasses.dataclass(frozen=True)
class Train:
    steps: Annotated[int, at_least(1), countable]
    eval_every: Annotated[int, at_least(1), countable]


@dataclasses.dataclass(frozen=True)
class Log:
    scalars_every: Annotated[int, at_least(1), countable]
    rows_every: Annotated[int, at_least(1), countable]
    probe_tokens: Annotated[int, at_least(1), countable]
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every: Annotated[int, at_least(1), countable]
    keep: Annotated[int, at_least(1), countable]


@dataclasses.dataclass(frozen=True)
class Config:
    """What one run depends on."""

    seed: Annotated[int, seed32]
    model: Model
    scheme: Options
    body: Options
    data: Data
    optimizer: Optimizer
    train: Train
    log: Log
    checkpoint: Checkpoint

    def __post_init__(self) -> None:
        if len(self.log.tokens) > MOST_TOKENS or len(set(self.log.tokens)) < len(self.log.tokens):
            raise ConfigError("log.tokens", self.log.tokens, f"at most {MOST_TOKENS} ids, each once")
        if not self.data.vocab_size:
            allowed = "at least 2; 0, for all that a text has, is resolved by experiments.train, compare and sweep"
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Arms by name, each with its config at the first seed, and how many seeds each is run with."""

    base: Config  # before the overrides of the arms
    arms: dict[str, Config]
    baseline: str
    seeds: int
    match: str
    margin: float  # of losses, nats a token: a smaller difference does not matter

    def runs(self) -> list[tuple[str, Config]]:
        """Every run as (arm, config), seed by seed, so that an early stop leaves whole pairs."""
        return [
            (arm, dataclasses.replace(config, seed=config.seed + k))
            for k in range(self.seeds)
            for arm, config in self.arms.items()
        ]


def resolved(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values with what each reference to another field gives now.

    Raises:
        ConfigError: one that gives nothing.
    """
    plain: dict[str, Any] = {}
    for name, value in values.items():
        field = f"{prefix}{name}"
        if isinstance(value, FieldReference):
            try:
                value = value.get()
            except Exception as error:  # of the config's own arithmetic
                raise ConfigError(field, None, f"what can be computed ({type(error).__name__}: {error})") from error
        plain[name] = resolved(value, field + ".") if isinstance(value, Mapping) else value
    return plain


def _kind(field: str, old: Any) -> Any:
    """The type that a field is declared with; that of its value where no dataclass declares it."""
    kind: Any = Config
    for name in field.split("."):
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return kind or (old.get_type() if isinstance(old, FieldReference) else type(old))


def put(values: dict[str, Any], field: str, value: Any) -> None:
    """Set the dotted `field` in nested `values`, in place; fields that refer to it follow."""
    *groups, name = field.split(".")
    for group in groups:
        values = values[group]
    if isinstance(values.get(name), FieldReference):
        values[name].set(value, type_safe=False)
    else:
        values[name] = value


def _parse(text: str, kind: Any, field: str) -> Any:
    """The text of an override as a value of the type that the field has."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(field, text, "true | false")
        return text.lower() == "true"
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if item is str and os.path.lexists(os.path.expanduser(text)):
            return (text,)  # the name of a file may hold commas
        brackets = text[:1] + text[-1:]
        if item is str and brackets == "[]":
            with contextlib.suppress(ValueError, RecursionError):  # names without quotes are no JSON
                listed = json.loads(text)
                if all(isinstance(name, str) for name in listed):
                    return tuple(listed)
        inner = text[1:-1] if brackets in ("()", "[]") else text
        items = [one.strip() for one in inner.split(",") if one.strip()]
        return tuple(_parse(one, item, field) for one in items)
    if kind is str:
        return text
    words = "a whole number" if kind is int else "a number"
    try:
        if kind is int and text.removeprefix("-").replace("_", "").isdecimal():
            return int(text)  # not by way of float, which holds whole numbers to 2**53 only
        number = float(text)
    except ValueError:
        raise ConfigError(field, text, words) from None
    if kind is int and not number.is_integer():
        raise ConfigError(field, text, words)
    return kind(number)


def override(values: dict[str, Any], field: str, text: str) -> None:
    """Set the dotted `field` in nested `values` from text, in place; fields that refer to it follow.

    New arms may be added; nothing else may.
    """
    *groups, name = field.split(".")
    group = values
    for depth, part in enumerate(groups):
        if not isinstance(group.get(part), dict):
            raise ConfigError(".".join(groups[: depth + 1]), text, f"no such group; there are {', '.join(group)}")
        group = group[part]
    if groups == ["compare", "arms"]:
        put(values, field, text)
        return
    if name not in group:
        raise ConfigError(field, text, f"no such field; the fields are {', '.join(group)}")
    if isinstance(group[name], dict):
        raise ConfigError(field, text, f"a field of this group: {', '.join(field + '.' + key for key in group[name])}")
    put(values, field, _parse(text, _kind(field, group[name]), field))


def _check_schedule(config: Config) -> None:
    """Refuse a schedule of the learning rate that never does what its fields say."""
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.schedule == "wsd" and not optimizer.decay_steps:
        raise ConfigError("optimizer.decay_steps", 0, "at least 1 with optimizer.schedule = 'wsd', or it never decays")
    if optimizer.schedule != "wsd" and optimizer.decay_steps:
        raise ConfigError("optimizer.decay_steps", optimizer.decay_steps, "0, unless optimizer.schedule = 'wsd'")
    # The first update after the warm-up has the full rate, and so has the first of the decay.
    rest, words = (optimizer.decay_steps, "optimizer.decay_steps") if optimizer.decay_steps else (1, "1")
    if optimizer.warmup_steps > steps - rest:
        raise ConfigError(
            "optimizer.warmup_steps",
            optimizer.warmup_steps,
            f"at most train.steps - {words} = {steps - rest}, so that the rate is reached",
        )


def read_data(values: Mapping[str, Any]) -> Data:
    """The group `data` of nested values, whose vocabulary may still be 0."""
    data = resolved(values).get("data")
    return build(Data, data, "data.")


def read_run(values: Mapping[str, Any]) -> Config:
    """The config of a run that is there already, from nested values: one that would not be started today, perhaps."""
    return build(Config, {name: value for name, value in values.items() if name != "compare"})


def build_run(values: Mapping[str, Any]) -> Config:
    """The config of one run from nested values; `compare`, which a run does not depend on, is left out."""
    config = read_run(resolved(values))
    _check_schedule(config)
    return config


def _build_arm(values: Mapping[str, Any], arm: str, overrides: str) -> Config:
    """The config of one arm: `field=value` for each of its overrides, separated by spaces."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", arm) or arm in RESERVED:
        raise ConfigError("compare.arms", arm, ARM_NAMES)
    own, changed = copy.deepcopy(dict(values)), {}
    for item in overrides.split():
        name, equals, text = item.partition("=")
        if not equals or name.startswith("compare"):
            allowed = "field=value, several separated by spaces; no field of compare"
            raise ConfigError(f"compare.arms.{arm}", overrides, allowed)
        override(own, name, text)
        changed[name] = text
    before, after = flatten(resolved(values)), flatten(resolved(own))
    # Those that refer to an overridden field among them.
    changed |= {name: value for name, value in after.items() if name not in changed and value != before.get(name)}
    for name, value in changed.items():
        if not name.startswith(OF_AN_ARM):
            raise ConfigError(
                f"{name} in compare.arms.{arm}",
                value,
                "in an arm, train.steps and the fields of model, scheme, body and optimizer; the arms of a comparison "
                f"share all else, and experiments.sweep --grid {name}=... compares across it",
            )
    return build_run(own)


def build_comparison(values: Mapping[str, Any]) -> Comparison:
    """The comparison that nested values describe.

    Raises:
        ConfigError: unknown field, wrong type, impossible value, or an arm that cannot be built.
    """
    base = build_run(values)
    compare = resolved(values).get("compare")
    if not isinstance(compare, Mapping):
        raise ConfigError("compare", compare, f"a group with {', '.join(COMPARE)}")
    for name in compare:
        if name not in COMPARE:
            raise ConfigError(f"compare.{name}", compare[name], f"no such field; the fields are {', '.join(COMPARE)}")
    seeds = convert(Annotated[int, at_least(1), at_most(MOST_SEEDS)], compare.get("seeds"), "compare.seeds")
    overrides_of = compare.get("arms")
    if not isinstance(overrides_of, Mapping):
        raise ConfigError("compare.arms", overrides_of, "a group of arms, each with its overrides")
    if len(overrides_of) > MOST_ARMS:
        raise ConfigError("compare.arms", f"{len(overrides_of):,} arms", f"at most {MOST_ARMS}")
    arms = {str(arm): _build_arm(values, str(arm), str(text)) for arm, text in overrides_of.items()}
    if len(arms) < 2:
        raise ConfigError("compare.arms", tuple(arms), "at least two arms")
    baseline = compare.get("baseline")
    if not isinstance(baseline, str) or baseline not in arms:
        raise ConfigError("compare.baseline", baseline, " | ".join(arms))
    last = base.seed + seeds - 1
    if last >= 2**32:
        raise ConfigError("seed", last - seeds + 1, f"at most 2**32 - {seeds}, so that compare.seeds = {seeds} fit")
    match = convert(Annotated[str, one_of("width", "parameters")], compare.get("match"), "compare.match")
    margin = convert(Annotated[float, positive, at_most(100)], compare.get("margin"), "compare.margin")
    return Comparison(base, arms, baseline, seeds, match, margin)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, as JSON holds them (lists for tuples)."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=dict))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`field: old -> new` for each dotted field in which two nested configs differ."""
    a, b = flatten(old), flatten(new)
    return [
        f"{name}: {a.get(name)!r} -> {b.get(name)!r}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def digest(values: Mapping[str, Any]) -> str:
    """A short name for nested values: the first 8 hex digits of the SHA-256 of their sorted JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
