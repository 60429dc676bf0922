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

import numpy as np
from jaxtyping import Float

from tied_lm import folder
from tied_lm.checks import ConfigError
from tied_lm.config import Data, build_comparison, flatten, override, put, resolved
from tied_lm.data.sources import Stream, with_vocabulary
from tied_lm.files import write_json
from tied_lm.study import comparison as c
from tied_lm.study.ownbest import at_own_best, difference
from tied_lm.study.plan import Plan, comparison_values

SWEEP = "sweep.json"
RESULTS = "results.json"
MOST_POINTS = 1000
RATES = ("optimizer.learning_rate", "optimizer.vocab_learning_rate")


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of the grid's values: a comparison in a folder of its own."""

    index: int
    settings: dict[str, Any]  # value by field
    plan: Plan
    place: Path

    def is_complete(self) -> bool:
        return c.is_complete(self.place, self.plan)


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
        for index, combination in enumerate(itertools.product(*grid.values())):
            settings = dict(zip(grid, combination, strict=True))
            changed = copy.deepcopy(dict(values))
            for field, value in settings.items():
                put(changed, field, value)
            points.append(Point(index, settings, Plan.of(changed, streams), place / _folder_name(index, settings)))
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


def _folder_name(index: int, settings: Mapping[str, Any]) -> str:
    """The index, which makes it unique, and the values, which make it readable."""
    names = short_names(list(settings))
    text = " ".join(f"{names[field]}={show(value)}" for field, value in settings.items())
    return f"{index:03d}-{re.sub('[^A-Za-z0-9._=+-]+', '-', text)[:100]}"


def results(sweep: Sweep) -> dict[str, Any]:
    """What a finished sweep found: the content of results.json. Losses are held-out, in nats, at the last step."""
    first = sweep.points[0].plan.comparison
    points = [_point_result(point) for point in sweep.points]
    about = {"arms": list(first.arms), "baseline": first.baseline, "seeds": first.seeds, "grid": sweep.values["grid"]}
    about["matched"] = any(point.plan.matched["arms"] for point in sweep.points)
    return about | {"points": points} | own_best_rates(points, first.baseline)


def _point_result(point: Point) -> dict[str, Any]:
    """A point's summary in short; None is the loss of an arm that diverged, and a difference that it enters."""
    summary, arms = c.read_summary(point.place), point.plan.arms
    found, differences = summary["arms"], summary["differences"]
    return {
        "index": point.index,
        "folder": point.place.name,
        "settings": point.settings,
        "parameters": {name: arm.trainer.account()["total"] for name, arm in arms.items()},
        "diverged": {name: arm["reason"] for name, arm in summary["diverged"].items()},
        "eval_loss": {name: found[name]["eval_loss"] if name in found else None for name in arms},
        "differences": {
            name: differences[name]["eval_loss"] if name in differences else None
            for name in arms
            if name != summary["baseline"]
        },
    }


def own_best_rates(points: Sequence[Mapping[str, Any]], baseline: str) -> dict[str, Any]:
    """Which fields of the grid are rates, and for each combination of the others the arms at their own best rates.

    The loss of an arm is that of each seed at rates which other seeds chose (see `at_own_best`), since a choice on the
    seeds that are then compared would be too good. `rates` is what a person would choose, over all seeds; with one
    seed there is only that. An arm that diverges at a rate counts as loss infinity there, whatever the seed.

    Args:
        points: each with its `index`, `settings`, `parameters` and `eval_loss`.
    """
    rates = [field for field in RATES if field in points[0]["settings"]]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for point in points if rates else ():
        groups.setdefault(repr(_without(point["settings"], rates)), []).append(point)
    found = []
    for group in groups.values():
        own = {arm: _own_rate(group, rates, arm) for arm in group[0]["eval_loss"]}
        base = own[baseline]
        for arm, values in own.items():
            if values is not None and base is not None and arm != baseline:
                values["difference"] = difference(_losses(group, arm), _losses(group, baseline))
        found.append(
            {
                "settings": _without(group[0]["settings"], rates),
                "parameters": group[0]["parameters"],
                "best_for_baseline": base and base["index"],
                "own": own,
            }
        )
    return {"rates": rates, "combinations": found}


def _without(settings: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    return {field: value for field, value in settings.items() if field not in fields}


def _losses(group: Sequence[Mapping[str, Any]], arm: str) -> Float[np.ndarray, "R S"]:
    """The losses of an arm by rate and seed; infinite at a rate at which it diverged."""
    seeds = next(len(v["per_seed"]) for point in group for v in point["eval_loss"].values() if v is not None)
    found = [point["eval_loss"][arm] for point in group]
    return np.array([np.full(seeds, np.inf) if values is None else values["per_seed"] for values in found])


def _own_rate(group: Sequence[Mapping[str, Any]], rates: Sequence[str], arm: str) -> dict[str, Any] | None:
    """The best rates of one arm, its loss at them, and which of them lie at an edge of the grid."""
    trained = [point for point in group if point["eval_loss"][arm] is not None]
    if not trained:
        return None
    losses_RxS = _losses(trained, arm)
    best = trained[int(np.argmin(losses_RxS.mean(axis=1)))]
    own_S = at_own_best(losses_RxS)
    edges = []
    for field in rates:
        tried = {point["settings"][field] for point in group} - {0.0}  # 0 stands for another field's rate
        if best["settings"][field] in (min(tried, default=None), max(tried, default=None)):
            edges.append(field)
    return {
        "index": best["index"],
        "rates": {field: best["settings"][field] for field in rates},
        "at_edge": edges,
        "eval_loss": {"mean": float(own_S.mean()), "ci95": None, "per_seed": own_S.tolist()},
        "difference": None,
    }
