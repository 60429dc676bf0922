"""What the points of a sweep say together: the content of results.json."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tied_lm.files import Damaged, read_json, write_json
from tied_lm.intervals import Crossed, Difference, Estimate, HeldoutEstimate
from tied_lm.model.embedding import count_parameters
from tied_lm.study.ownbest import at_own_best, difference
from tied_lm.study.summary import AGAIN, Split, Summary, read_summary, typed
from tied_lm.study.sweep import Point, Sweep

RESULTS = "results.json"
RATES = ("optimizer.learning_rate", "optimizer.vocab_learning_rate")
Settings = dict[str, Any]  # values of the grid, by field


@dataclasses.dataclass(frozen=True)
class PointResult:
    """A point's summary in short. None is the loss of an arm that diverged, and a difference that it enters. Fields
    with a default are those that older files lack."""

    index: int
    folder: str
    settings: Settings
    parameters: dict[str, int]
    diverged: dict[str, str]  # reason by arm
    eval_loss: dict[str, HeldoutEstimate | None]
    differences: dict[str, Difference | None]
    caveats: dict[str, tuple[str, ...]]  # sentences by arm
    # Over the probe at the last step; None for an arm that is not tied.
    splits: dict[str, Split | None] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, point: Point, summary: Summary, intervals: int) -> "PointResult":
        """One of the points of a table.

        Args:
            intervals: how many of differences hold at once in the table.
        """
        arms = point.plan.arms
        return cls(
            index=point.index,
            folder=point.place.name,
            settings=point.settings,
            parameters={name: count_parameters(arm.trainer.model)["total"] for name, arm in arms.items()},
            diverged={name: arm.reason for name, arm in summary.diverged.items()},
            eval_loss={name: summary.arms[name].eval_loss if name in summary.arms else None for name in arms},
            differences={
                name: _among(intervals, summary, name) if name in summary.differences else None
                for name in arms
                if name != summary.baseline
            },
            caveats={name: arm.caveats for name, arm in summary.arms.items()},
            splits={name: arm.split for name, arm in summary.arms.items()},
        )


def _among(intervals: int, summary: Summary, arm: str) -> Difference:
    """A difference of a comparison with an interval that holds together with those of others."""
    assert summary.clusters is not None  # since there is a difference
    assert summary.margin is not None
    alone = summary.differences[arm]
    found = Crossed.of_estimate(alone, summary.clusters.count).difference(summary.margin, intervals)
    together = {name: getattr(found, name) for name in ("ci95_simultaneous", "outcome", "seeds_to_decide")}
    return dataclasses.replace(alone, **together)


@dataclasses.dataclass(frozen=True)
class OwnBest:
    """An arm at the rates that are best for it.

    The loss is that of each seed at rates which other seeds chose (see `at_own_best`), since a choice on the seeds that
    are then compared would be too good. `rates` is what a person would choose, over all seeds; with one seed there is
    only that. An arm that diverges at a rate counts as loss infinity there, whatever the seed.
    """

    index: int  # of the point with these rates
    rates: Settings
    at_edge: list[str]  # which of them lie at an edge of the grid
    eval_loss: Estimate
    difference: Difference | None  # to the baseline at its own


@dataclasses.dataclass(frozen=True)
class Combination:
    """The arms at their own best rates, with all other fields of the grid the same."""

    settings: Settings  # of the other fields
    parameters: dict[str, int]
    best_for_baseline: int | None  # index of the point
    own: dict[str, OwnBest | None]  # None for an arm that diverged at all rates


@dataclasses.dataclass(frozen=True)
class Results:
    """What a finished sweep found. Losses are held-out, in nats a token, at the last step. Of the differences, those of
    all points hold at once, and so do those of all arms at their own best rates."""

    arms: list[str]
    baseline: str
    seeds: int
    margin: float
    looks: tuple[int, ...]  # numbers of seeds at which a point was looked at
    grid: dict[str, list[Any]]
    matched: bool
    points: list[PointResult]
    rates: list[str]  # which fields of the grid are rates
    combinations: list[Combination]
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, sweep: Sweep) -> "Results":
        comparison = sweep.points[0].plan.comparison
        summaries = [read_summary(point.place) for point in sweep.points]
        intervals = sum(len(summary.differences) for summary in summaries)
        points = [PointResult.of(*pair, intervals) for pair in zip(sweep.points, summaries, strict=True)]
        rates = [field for field in RATES if field in sweep.values["grid"]]
        return cls(
            arms=list(comparison.arms),
            baseline=comparison.baseline,
            seeds=comparison.seeds,
            margin=comparison.margin,
            looks=max((summary.looks for summary in summaries), key=len),
            grid=sweep.values["grid"],
            matched=any(point.plan.matched.arms for point in sweep.points),
            points=points,
            rates=rates,
            combinations=own_best_rates(points, rates, comparison.baseline, comparison.margin),
            versions=summaries[0].versions,
        )


def own_best_rates(
    points: Sequence[PointResult], rates: Sequence[str], baseline: str, margin: float
) -> list[Combination]:
    """The arms at their own best rates for each combination of the other fields; none without rates."""
    groups: dict[str, list[PointResult]] = {}
    for point in points if rates else ():
        groups.setdefault(repr(_without(point.settings, rates)), []).append(point)
    found = [{arm: _own_best(group, rates, arm) for arm in group[0].eval_loss} for group in groups.values()]
    intervals = sum(bool(best and own[baseline]) for own in found for arm, best in own.items() if arm != baseline)
    combinations = []
    for group, own in zip(groups.values(), found, strict=True):
        base, settings = own[baseline], _without(group[0].settings, rates)
        for arm, best in own.items():
            if best and base and arm != baseline:
                against = difference(_losses(group, arm), _losses(group, baseline), margin, intervals)
                own[arm] = dataclasses.replace(best, difference=against)
        combinations.append(Combination(settings, group[0].parameters, base.index if base else None, own))
    return combinations


def write_results(place: Path, results: Results) -> None:
    """Write results.json into the folder of a sweep."""
    write_json(place / RESULTS, dataclasses.asdict(results))


def read_results(place: Path) -> Results:
    """What `write_results` wrote, now or in an older version.

    Raises:
        Damaged: it is not that.
        FileNotFoundError: there is none.
    """
    values = read_json(place / RESULTS, AGAIN)
    try:
        results: Results = typed(Results, values)
        return results
    except (AttributeError, KeyError, TypeError):
        raise Damaged(f"{place / RESULTS} holds no results; {AGAIN}") from None


def _without(settings: Settings, fields: Sequence[str]) -> Settings:
    return {field: value for field, value in settings.items() if field not in fields}


def _losses(group: Sequence[PointResult], arm: str) -> Float[np.ndarray, "R S"]:
    """The losses of an arm by rate and seed; infinite at a rate at which it diverged."""
    seeds = next(len(loss.per_seed) for point in group for loss in point.eval_loss.values() if loss is not None)
    found = [point.eval_loss[arm] for point in group]
    return np.array([np.full(seeds, np.inf) if loss is None else loss.per_seed for loss in found], float)


def _own_best(group: Sequence[PointResult], rates: Sequence[str], arm: str) -> OwnBest | None:
    trained = [point for point in group if point.eval_loss[arm] is not None]
    if not trained:
        return None
    losses_RxS = _losses(trained, arm)
    best = trained[int(np.argmin(losses_RxS.mean(axis=1)))]
    own_S = at_own_best(losses_RxS)
    edges = []
    for field in rates:
        tried = {point.settings[field] for point in group} - {0.0}  # 0 stands for another field's rate
        if best.settings[field] in (min(tried, default=None), max(tried, default=None)):
            edges.append(field)
    loss = Estimate(float(own_S.mean()), None, tuple(own_S.tolist()))
    return OwnBest(best.index, {field: best.settings[field] for field in rates}, edges, loss, None)
