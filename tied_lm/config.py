"""The config as frozen dataclasses, built once at the boundary and checked there."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from ml_collections import FieldReference

from tied_lm.tokenstring import printable

T = TypeVar("T")
SHOWN = 200  # characters of a value in a message, at most


class ConfigError(ValueError):
    """A mistake in the config, told in one line that harms no terminal: the field, its value, and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str):
        try:
            shown = "nothing" if value is None else repr(value)
        except ValueError:  # Python writes no whole number of more than 4,300 digits
            shown = "a number of very many digits"
        if len(shown) > SHOWN:
            shown = shown[:SHOWN] + " ..."
        super().__init__(printable(f"{field} = {shown} is not possible; allowed: {allowed}"))


@dataclasses.dataclass(frozen=True)
class Allowed:
    """A condition on one value, in words and as a test."""

    words: str
    test: Callable[[Any], bool]


def at_least(low: int) -> Allowed:
    return Allowed(f"at least {low}", lambda x: x >= low)


def at_most(high: int) -> Allowed:
    return Allowed(f"at most {high:,}", lambda x: x <= high)


def one_of(*names: str) -> Allowed:
    return Allowed(" | ".join(names), lambda x: x in names)


positive = Allowed("above 0", lambda x: x > 0)
not_negative = Allowed("0 or more", lambda x: x >= 0)
rows = Allowed("at least 2 (0 is for all that a text has)", lambda x: x >= 2 or x == 0)
fraction = Allowed("0 to 1", lambda x: 0 <= x <= 1)
open_fraction = Allowed("between 0 and 1, both excluded", lambda x: 0 < x < 1)
below_one = Allowed("0 or more, below 1 (as float32)", lambda x: 0 <= x < 1 - 2**-25)
seed32 = Allowed("0 to 2**32 - 1", lambda x: 0 <= x < 2**32)
countable = at_most(10**9)  # so that sums of two still fit int32
wide = at_most(2**16)  # of widths, whose squares have to fit the memory

MOST_RECORDS = 2**20  # of one kind in a run
MOST_TOKENS = 100  # to follow as curves
MOST_SEEDS = 10_000
MOST_ARMS = 100
RESERVED = ("mean", "hypothetical")  # names of what stands beside the arms
ARM_NAMES = (
    f"at most 64 letters, digits, - and _, the first a letter or digit; {' and '.join(RESERVED)} have another meaning"
)
SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127  # of what float32 holds, but for 0

# Of what a config means, entered in config.json. It grows when the same fields come to mean something else: older
# folders can be read, but not continued. Those that say nothing are of version 1.
VERSION = 2

COMPARE = ("arms", "baseline", "seeds", "match", "margin")  # the fields of the group `compare`, on which no run depends
# What an arm may set. All else is shared: on other tokens, seeds or probes its numbers could not be paired.
OF_AN_ARM = ("model.", "scheme.", "body.", "optimizer.", "train.steps")


class Options(Mapping[str, Any]):
    """Values by name, for a class that is found by its name and declares what it takes: a tying scheme, a body."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._values.items())))


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


def choose(registry: Mapping[str, T], field: str, name: str) -> T:
    """The entry of a registry that a config field names."""
    if name not in registry:
        raise ConfigError(field, name, " | ".join(registry))
    return registry[name]


def _convert(kind: Any, value: Any, field: str) -> Any:
    """`value` as the type that a dataclass field declares."""
    conditions: tuple[Allowed, ...] = ()
    if typing.get_origin(kind) is Annotated:
        kind, *rest = typing.get_args(kind)
        conditions = tuple(rest)
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, field + ".")
    if kind is Options:
        if not isinstance(value, Mapping):
            raise ConfigError(field, value, "a group of fields")
        return Options(value)
    words = ", ".join(c.words for c in conditions)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, (tuple, list)):
            raise ConfigError(field, value, f"a list of {item.__name__}")
        return tuple(_convert(item, v, field) for v in value)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) <= LARGEST else math.inf
    if type(value) is not kind:
        raise ConfigError(field, value, f"{kind.__name__}{', ' + words if words else ''}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(field, value, "a finite number" + (", " + words if words else ""))
    if kind is float and value and not SMALLEST <= abs(value) <= LARGEST:
        raise ConfigError(field, value, f"what float32 holds: 0, or {SMALLEST:.2g} to {LARGEST:.2g}")
    if kind is str and "\0" in value:
        raise ConfigError(field, value, "text without NUL")
    failed = [c.words for c in conditions if not c.test(value)]
    if failed:
        raise ConfigError(field, value, ", ".join(failed))
    return value


@functools.cache
def _declared(kind: type, base: type) -> dict[str, Any]:
    """The types of the options that a dataclass declares beyond its base."""
    kinds = typing.get_type_hints(kind, include_extras=True)
    inherited = {field.name for field in dataclasses.fields(base)}
    return {field.name: kinds[field.name] for field in dataclasses.fields(kind) if field.name not in inherited}


def own_options(kind: type, base: type, options: Options, group: str) -> dict[str, Any]:
    """Of the options in a group, those that a dataclass declares beyond its base; checked as it declares them."""
    declared = _declared(kind, base)
    for name in declared:
        if name not in options:
            raise ConfigError(f"{group}.{name}", None, "a value; the config lacks this field")
    return {name: _convert(type_, options[name], f"{group}.{name}") for name, type_ in declared.items()}


def check_options(kinds: Iterable[type], base: type, options: Options, group: str) -> None:
    """Refuse an option, used or not, that no class declares, or whose value no class that declares it would take."""
    declared: dict[str, list[Any]] = {}
    for kind in kinds:
        for name, type_ in _declared(kind, base).items():
            declared.setdefault(name, []).append(type_)
    for name, value in options.items():
        field, error = f"{group}.{name}", None
        if name not in declared:
            raise ConfigError(field, value, f"no such field; the fields are {', '.join(declared)}")
        for type_ in declared[name]:
            try:
                _convert(type_, value, field)
                break
            except ConfigError as refusal:
                error = refusal
        else:
            assert error is not None
            raise error


def _build(kind: type[T], values: Any, prefix: str = "") -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(prefix.rstrip("."), values, "a group of fields")
    kinds = typing.get_type_hints(kind, include_extras=True)
    for name in values:
        if name not in kinds:
            raise ConfigError(f"{prefix}{name}", values[name], f"no such field; the fields are {', '.join(kinds)}")
    for name in kinds:
        if name not in values:
            raise ConfigError(prefix + name, None, "a value; the config lacks this field")
    return kind(**{name: _convert(k, values[name], prefix + name) for name, k in kinds.items()})


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
    return _build(Data, data, "data.")


def read_run(values: Mapping[str, Any]) -> Config:
    """The config of a run that is there already, from nested values: one that would not be started today, perhaps."""
    return _build(Config, {name: value for name, value in values.items() if name != "compare"})


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
    seeds = _convert(Annotated[int, at_least(1), at_most(MOST_SEEDS)], compare.get("seeds"), "compare.seeds")
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
    match = _convert(Annotated[str, one_of("width", "parameters")], compare.get("match"), "compare.match")
    margin = _convert(Annotated[float, positive, at_most(100)], compare.get("margin"), "compare.margin")
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
