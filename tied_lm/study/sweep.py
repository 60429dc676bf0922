"""A grid of config fields: a comparison for each point, and what they say together."""

import copy
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tied_lm.checks import ConfigError
from tied_lm.config import Data, build_comparison, flatten, folder, override, put, resolved
from tied_lm.config.folder import SWEEP
from tied_lm.data.sources import Stream, with_vocabulary
from tied_lm.files import write_json
from tied_lm.study import comparison as c
from tied_lm.study.plan import Plan, comparison_values
from tied_lm.train.step import Trainer

MOST_POINTS = 1000


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of the grid's values: a comparison in a folder of its own."""

    index: int
    settings: dict[str, Any]  # value by field
    plan: Plan
    place: Path

    def is_complete(self) -> bool:
        return c.is_complete(self.place, self.plan)

    @property
    def programs(self) -> tuple[Trainer, ...]:
        """Equal for points that differ in nothing but hyperparameters, which can share what is compiled."""
        return tuple(arm.trainer for arm in self.plan.arms.values())


def by_programs(points: Sequence[Point]) -> list[Point]:
    """Those of the same programs together, and else in their order."""
    together: dict[tuple[Trainer, ...], list[Point]] = {}
    for point in points:
        together.setdefault(point.programs, []).append(point)
    return list(itertools.chain.from_iterable(together.values()))


@dataclasses.dataclass(frozen=True)
class Sweep:
    place: Path
    points: list[Point]
    values: dict[str, Any]  # the content of sweep.json

    @classmethod
    def of(cls, values: Mapping[str, Any], grid: Mapping[str, list[Any]], place: Path) -> "Sweep":
        """Every point of a grid, so that a mistake in any of them shows before anything is written.

        Raises:
            ConfigError: of `Plan.of`, for the first point that has a mistake.
        """
        streams: dict[Data, Stream] = {}
        points = []
        for index, settings in enumerate(settings_of(grid)):
            changed = copy.deepcopy(dict(values))
            for field, value in settings.items():
                put(changed, field, value)
            points.append(Point(index, settings, Plan.of(changed, streams), place / folder_name(index, settings)))
        return cls(place, points, resolved_values(values, grid))

    def open(self) -> None:
        """Open or create the folder, also while others do so.

        Raises:
            ConfigError: it, or the folder of a point, is that of something else; the fields that differ are named.
        """
        c.check_folder(self.place, self.values, SWEEP)
        for point in self.points:
            c.check_folder(point.place, point.plan.values)
        with folder.locked(self.place, wait=True):
            c.check_folder(self.place, self.values, SWEEP)
            write_json(self.place / SWEEP, self.values)

    def is_complete(self) -> bool:
        return all(point.is_complete() for point in self.points)


def settings_of(grid: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Value by field, for each point of a grid, in their order."""
    return [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*grid.values())]


def read_grid(values: Mapping[str, Any], texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each field, from texts `field=value,value,...`.

    Raises:
        ConfigError: no such field or value, a value twice, or a field that does not vary what is compared.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        field, equals, listed = text.partition("=")
        if not equals or field in grid:
            raise ConfigError("grid", text, "field=value,value,... for each field once")
        if field in ("compare.seeds", "compare.baseline", "compare.margin"):
            raise ConfigError("grid", text, "a field that may differ between the points of one table")
        grid[field] = []
        for item in listed.split(","):
            changed = copy.deepcopy(dict(values))
            override(changed, field, item.strip())
            value = flatten(resolved(changed))[field]
            if value in grid[field]:
                raise ConfigError("grid", text, f"each value once; {item.strip()} is there twice")
            grid[field].append(value)
        for arm, overrides in values["compare"]["arms"].items():
            if any(part.partition("=")[0] == field for part in str(overrides).split()):
                raise ConfigError("grid", text, f"a field that no arm sets itself; compare.arms.{arm} = {overrides!r}")
    points = math.prod(map(len, grid.values()))
    if points > MOST_POINTS:
        raise ConfigError("grid", " ".join(texts), f"at most {MOST_POINTS:,} points; these are {points:,}")
    if not grid:
        raise ConfigError("grid", None, "at least one --grid field=value,value,...")
    return grid


def resolved_values(values: Mapping[str, Any], grid: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The content of sweep.json: the resolved base config and the grid."""
    plain = json.loads(json.dumps(dict(grid)))  # lists for tuples, as they are read back
    values = with_vocabulary(values)
    return comparison_values(values, build_comparison(values)) | {"grid": plain}


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted field, or all of it where two end alike."""
    last = [field.rpartition(".")[2] for field in fields]
    return {field: name if last.count(name) == 1 else field for field, name in zip(fields, last, strict=True)}


def show(value: Any) -> str:
    """A value of the grid as text."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def folder_name(index: int, settings: Mapping[str, Any]) -> str:
    """The index, which makes it unique, and the values, which make it readable."""
    names = short_names(list(settings))
    text = " ".join(f"{names[field]}={show(value)}" for field, value in settings.items())
    return f"{index:03d}-{re.sub('[^A-Za-z0-9._=+-]+', '-', text)[:100]}"
