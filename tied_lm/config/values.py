"""Nested values of a config as they come from a file: groups by name, and in them fields; and references among them."""

import copy
from collections.abc import Mapping
from typing import Any

from ml_collections import FieldReference

from tied_lm.checks import ConfigError


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


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def put(values: dict[str, Any], field: str, value: Any) -> None:
    """Set the dotted `field` in nested `values`, in place; fields that refer to it follow."""
    *groups, name = field.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    if isinstance(values.get(name), FieldReference):
        values[name].set(value, type_safe=False)
    else:
        values[name] = value


def completed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, with the default of each group, and of each field of a group, that is missing."""
    new = copy.deepcopy(dict(defaults))
    groups = {
        name: {**group, **values[name]}
        for name, group in new.items()
        if isinstance(group, Mapping) and isinstance(values.get(name), Mapping)
    }
    return {**new, **values, **groups}
