"""Fair comparisons: arms of the baseline's size."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from tied_lm.checks import ConfigError, Options
from tied_lm.config import Comparison, Config
from tied_lm.model.bodies import BODIES
from tied_lm.model.embedding import count_parameters
from tied_lm.train.build import build_model

TOLERANCE = 0.01  # of the baseline's number of parameters
LARGEST = 2**20  # width that is tried
DEEPEST = 2**10  # blocks that are tried
LARGEST_GAP = 2**10  # from one possible width to the next, of which heads are a divisor for example


@dataclasses.dataclass(frozen=True)
class Matching:
    """What was done to the arms, so that they are of a size."""

    rule: str  # compare.match
    arms: dict[str, dict[str, tuple[int, ...]]]  # of those that were changed: before and after, of each field changed
    # and of `parameters`


class Candidate(NamedTuple):
    config: Config
    parameters: int


def _candidate(config: Config) -> Candidate:
    """A config and the number of parameters that its model has. Nothing is allocated."""
    return Candidate(config, count_parameters(build_model(config))["total"])


def match(comparison: Comparison) -> tuple[Comparison, Matching]:
    """The comparison with arms as `compare.match` wants them, and what was done to them.

    With `depth`, an arm gets the number of blocks with which its number of parameters comes nearest to the baseline's,
    then, if that is off by more than 1 %, the nearest `body.width`; what is left is told.
    With `parameters`, an arm with fewer parameters than the baseline is widened and one with more is narrowed, until
    their numbers agree within 1 %: by `model.features`, then by `body.width` if the body has it and features alone
    do not do.

    Raises:
        ConfigError: an arm cannot be matched; with `parameters` the nearest numbers are told.
    """
    arms, changes = dict(comparison.arms), {}
    if comparison.match != "width":
        baseline = _candidate(comparison.arms[comparison.baseline])
        for name, config in comparison.arms.items():
            old = _candidate(config)
            if comparison.match == "depth":
                new = _deepened(name, old, baseline.parameters)
            else:
                new = _matched(name, old, comparison.baseline, baseline.parameters)
            arms[name] = new.config
            if new != old:
                changes[name] = _changes(old, new)
    return dataclasses.replace(comparison, arms=arms), Matching(comparison.match, changes)


def _changes(old: Candidate, new: Candidate) -> dict[str, tuple[int, ...]]:
    pairs = {
        "model.features": tuple(c.config.model.features for c in (old, new)),
        "body.depth": tuple(c.config.body.get("depth", 0) for c in (old, new)),
        "body.width": tuple(_body_width(c.config) for c in (old, new)),
        "parameters": tuple(c.parameters for c in (old, new)),
    }
    if old.config.body.get("width") == new.config.body.get("width"):  # a width of 0 follows D
        del pairs["body.width"]
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def _body_width(config: Config) -> int:
    """The width that a body has, which a config may leave to its default."""
    kind = BODIES[config.model.body]
    default = kind.default_width * config.model.features if kind is not None else 0
    return config.body.get("width", 0) or default


def _matched(name: str, old: Candidate, baseline: str, target: int) -> Candidate:
    """An arm, changed until it has `target` parameters within the tolerance."""

    def distance(candidate: Candidate) -> int:
        return abs(candidate.parameters - target)

    def features(value: int) -> Config:
        return dataclasses.replace(old.config, model=dataclasses.replace(old.config.model, features=value))

    nearest = [old]  # nearest first
    if distance(old) > TOLERANCE * target:
        width = old.config.model.features
        limits = (width, LARGEST) if old.parameters < target else (1, width)
        nearest = sorted(_around(features, *limits, target), key=distance)
    if distance(nearest[0]) > TOLERANCE * target and _has_width(old.config):
        for near in list(nearest):
            nearest += _around(functools.partial(_with_body, near.config, "width"), 1, LARGEST, target)
        nearest.sort(key=distance)
    if distance(nearest[0]) > TOLERANCE * target:
        totals = sorted({candidate.parameters for candidate in nearest}, key=lambda total: abs(total - target))[:2]
        raise ConfigError(
            "compare.match",
            "parameters",
            f"arms that can have the {target:,} parameters of {baseline} within 1%; the nearest that {name} can have: "
            + " and ".join(f"{total:,}" for total in sorted(totals)),
        )
    return nearest[0]


def _deepened(name: str, old: Candidate, target: int) -> Candidate:
    """An arm with the number of blocks, then the width of its body, that come nearest to `target` parameters.

    Raises:
        ConfigError: it has no body.
    """
    if old.config.model.body == "none":
        raise ConfigError("compare.match", "depth", f"width | parameters, since {name} has no body (model.body)")

    def distance(candidate: Candidate) -> int:
        return abs(candidate.parameters - target)

    if distance(old) <= TOLERANCE * target:
        return old
    depths = _around(functools.partial(_with_body, old.config, "depth"), 1, DEEPEST, target)
    nearest = min([old, *depths], key=distance)
    if distance(nearest) <= TOLERANCE * target or not _has_width(old.config):
        return nearest
    return min(
        [nearest, *_around(functools.partial(_with_body, nearest.config, "width"), 1, LARGEST, target)], key=distance
    )


def _has_width(config: Config) -> bool:
    kind = BODIES[config.model.body]
    return kind is not None and "width" in {field.name for field in dataclasses.fields(kind)}


def _with_body(config: Config, field: str, value: int) -> Config:
    return dataclasses.replace(config, body=Options(dict(config.body) | {field: value}))


def _around(vary: Callable[[int], Config], low: int, high: int, target: int) -> list[Candidate]:
    """Of the models that can be built with a value from low to high, the last below `target` and the first not below.

    By bisection, since the number of parameters grows with the value. Some values may be impossible, a width that
    the heads do not divide for example.
    """
    step = low
    below: Candidate | None = None
    above: Candidate | None = None
    while low <= high:
        # Doubled until the target is passed, so that no model far above it is looked at.
        middle = (low + high) // 2 if above is not None else min(max(step, low), high)
        step *= 2
        possible = _first_possible(vary, middle, high)
        if possible is None:
            high = middle - 1
        elif possible[1].parameters < target:
            low, below = possible[0] + 1, possible[1]
        else:
            high, above = middle - 1, possible[1]
    return [candidate for candidate in (below, above) if candidate is not None]


def _first_possible(vary: Callable[[int], Config], low: int, high: int) -> tuple[int, Candidate] | None:
    """The first value from `low` to `high` with which a model can be built, and that model."""
    for value in range(low, min(high, low + LARGEST_GAP) + 1):
        try:
            return value, _candidate(vary(value))
        except ConfigError:
            continue
    return None
