"""What a value may be, in words and as a test; and the one-line error for a value that it may not be.

Fields of dataclasses and of modules say so in their annotations: `Annotated[int, at_least(1)]`.
"""

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np

from tied_lm.tokenstring import printable

T = TypeVar("T")
SHOWN = 200  # characters of a field or value in a message, at most


class ConfigError(ValueError):
    """A mistake in the config, told in one line that harms no terminal: the field, its value, and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str):
        try:
            shown = "nothing" if value is None else repr(value)
        except ValueError:  # Python writes no whole number of more than 4,300 digits
            shown = "a number of very many digits"
        super().__init__(printable(f"{_cut(field)} = {_cut(shown)} is not possible; allowed: {allowed}"))
        self.field, self.value, self.allowed = field, value, allowed


def _cut(text: str) -> str:
    shown = printable(text[: SHOWN + 1])
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + " ..."


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

SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127  # of what float32 holds, but for 0


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


def choose(registry: Mapping[str, T], field: str, name: str) -> T:
    """The entry of a registry that a config field names."""
    if name not in registry:
        raise ConfigError(field, name, " | ".join(registry))
    return registry[name]


def convert(kind: Any, value: Any, field: str) -> Any:
    """`value` as the type that a dataclass field declares."""
    conditions: tuple[Allowed, ...] = ()
    if typing.get_origin(kind) is Annotated:
        kind, *rest = typing.get_args(kind)
        conditions = tuple(rest)
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, field + ".")
    if kind is Options:
        if not isinstance(value, Mapping):
            raise ConfigError(field, value, "a group of fields")
        return Options(value)
    words = ", ".join(c.words for c in conditions)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, (tuple, list)):
            raise ConfigError(field, value, f"a list of {item.__name__}")
        return tuple(convert(item, v, field) for v in value)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) <= LARGEST else math.inf
    if type(value) is not kind:
        raise ConfigError(field, value, f"{kind.__name__}{', ' + words if words else ''}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(field, value, "a finite number" + (", " + words if words else ""))
    failed = [c.words for c in conditions if not c.test(value)]
    if kind is float and value and not failed and not SMALLEST <= abs(value) <= LARGEST:
        zero = "" if any(not c.test(0.0) for c in conditions) else "0, or "
        raise ConfigError(field, value, f"what float32 holds: {zero}{SMALLEST:.2g} to {LARGEST:.2g}")
    if kind is str and "\0" in value:
        raise ConfigError(field, value, "text without NUL")
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
    return {name: convert(type_, options[name], f"{group}.{name}") for name, type_ in _declared(kind, base).items()}


def default_options(kinds: Iterable[type], base: type) -> dict[str, Any]:
    """The defaults of all options that dataclasses declare beyond their base; where two declare one, it is the same."""
    return {name: getattr(kind, name) for kind in kinds for name in _declared(kind, base)}


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
                convert(type_, value, field)
                break
            except ConfigError as refusal:
                error = refusal
        else:
            assert error is not None
            raise error


def build(kind: type[T], values: Any, prefix: str = "") -> T:
    """A dataclass from its fields by name; those that are missing have their defaults."""
    if not isinstance(values, Mapping):
        raise ConfigError(prefix.rstrip("."), values, "a group of fields")
    kinds = typing.get_type_hints(kind, include_extras=True)
    for name in values:
        if name not in kinds:
            raise ConfigError(f"{prefix}{name}", values[name], f"no such field; the fields are {', '.join(kinds)}")
    return kind(**{name: convert(kinds[name], value, prefix + name) for name, value in values.items()})


def check_integer(name: str, value: object, low: int) -> int:
    """The value as an int from `low` on, in 64 bits; neither a float nor a bool is one."""
    allowed = f"an integer from {low} to 2**63 - 1"
    number = _integer(name, value, allowed)
    if not low <= number < 2**63:
        raise ConfigError(name, value, allowed)
    return number


def _integer(name: str, value: object, allowed: str) -> int:
    try:
        return operator.index(None if isinstance(value, bool | np.bool_) else value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(name, value, allowed) from None


@functools.cache
def _conditions(kind: type) -> dict[str, tuple[type, tuple[Allowed, ...]]]:
    """Of the fields of a class that are annotated with conditions, the types and the conditions."""
    hints = typing.get_type_hints(kind, include_extras=True)
    annotated = {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Annotated}
    return {name: (kind, tuple(rest)) for name, (kind, *rest) in annotated.items()}


def check_fields(module: object) -> None:
    """Refuse a module one of whose fields is not what its annotation allows.

    Raises:
        ConfigError: the field, its value and what is allowed.
    """
    for name, (kind, conditions) in _conditions(type(module)).items():  # type: ignore[arg-type]
        value = getattr(module, name)
        words = ", ".join(condition.words for condition in conditions)
        if kind is int:
            _integer(name, value, f"an integer, {words}")
        if not all(condition.test(value) for condition in conditions):
            raise ConfigError(name, value, words)
