"""Fields that are set from text: by the command line, an arm, a grid."""

import contextlib
import dataclasses
import json
import os
import typing
from typing import Any

from ml_collections import FieldReference

from tied_lm.checks import ConfigError
from tied_lm.config.fields import OPTIONS, Config, option_defaults
from tied_lm.config.values import put


def _kind(field: str, old: Any) -> Any:
    """The type that a field is declared with; that of its value where no dataclass declares it."""
    kind: Any = Config
    for name in field.split("."):
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return kind or (old.get_type() if isinstance(old, FieldReference) else type(old))


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
    if name not in group and field.startswith(tuple(f"{group}." for group in OPTIONS)):
        group.update(option_defaults(groups[0]) | group)
    if name not in group:
        raise ConfigError(field, text, f"no such field; the fields are {', '.join(group)}")
    if isinstance(group[name], dict):
        raise ConfigError(field, text, f"a field of this group: {', '.join(field + '.' + key for key in group[name])}")
    put(values, field, _parse(text, _kind(field, group[name]), field))
