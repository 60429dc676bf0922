"""Runs that no seed made: in `mean/<arm>` the mean over the seeds and the ends of its interval, for TensorBoard."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tied_lm.bands import NAMES
from tied_lm.config.folder import SWEEP
from tied_lm.intervals import Estimate, summarize
from tied_lm.record.cards import card_of
from tied_lm.record.events import Summary, described, summary, write_events
from tied_lm.record.reader import Run
from tied_lm.record.scalars import read_metrics
from tied_lm.study.heldout import Heldout
from tied_lm.study.summary import SCALES
from tied_lm.study.summary import Summary as Found

MEAN = "mean"
LINES = 6  # in one chart at most
CHARTS = "charts"  # name of the file of these
CATEGORIES = ("Loss", "Share of the lookup", "Cosine", "Loss by band")
ENDS = "Where there is no interval, the ends lie on the mean."


class Curve(NamedTuple):
    """What is drawn of one arm in one chart."""

    chart: str
    title: str
    about: str
    estimates: Mapping[int, Estimate]  # by step


Curves = dict[str, Curve]  # by tag
Charts = dict[str, list]  # by title: kind and tags


def _losses(found: Found, heldout: Mapping[str, Mapping[int, Heldout]], arm: str) -> Curves:
    """What is held out, with intervals over seeds and held-out tokens."""
    by_step, base = heldout[arm], heldout.get(found.baseline, {})
    curves = {}
    measures = {step: one.measures(perplexity=False) for step, one in by_step.items()}
    covers = "mean over the seeds; ends of the 95% interval over seeds and held-out tokens"
    curves["loss/eval"] = Curve(
        "Loss", "held-out loss, nats a token", covers, {s: m.eval_loss for s, m in measures.items()}
    )
    excess = {step: one.excess for step, one in measures.items() if one.excess is not None}
    if excess:
        curves["loss/excess"] = Curve("Loss", "excess over the best possible loss, nats a token", covers, excess)
    if arm != found.baseline and base and found.margin is not None:
        less, count = f"less {found.baseline}", len(found.differences)
        curves[f"loss/less_{found.baseline}"] = Curve(
            "Loss",
            f"held-out loss {less}, nats a token",
            "mean of the differences, paired by seed; ends of the interval that the verdict goes by",
            {s: one.less(base[s]).difference(found.margin, count) for s, one in by_step.items() if s in base},
        )
    for band in found.arms[arm].bands:
        losses = {step: one for step, held in by_step.items() if (one := held.band_loss(band)) is not None}
        if losses:
            curves[f"loss/of_band/{band}"] = Curve(
                "Loss by band", f"held-out loss, band {band}, nats a token", covers, losses
            )
    return curves


def _splits(runs: Sequence[Run], bands: Sequence[str]) -> Curves:
    """Share and cosine over the probe, with intervals over seeds."""
    lines = [read_metrics(run.folder) for run in runs]
    curves = {}
    places = {"split": "all rows"} | {f"band/{band}": f"band {band}" for band in bands}
    for key, (group, rows) in itertools.product(SCALES, places.items()):
        tag = f"probe/{group}/{key}"
        by_seed = [{line["step"]: line[tag] for line in of_run if tag in line} for of_run in lines]
        steps = [step for step in by_seed[0] if not all(math.isnan(one.get(step, math.nan)) for one in by_seed)]
        values = {step: summarize([one.get(step, math.nan) for one in by_seed], SCALES[key]) for step in steps}
        title = f"the lookup's share, {rows}" if key == "share" else f"cosine of lookup and scoring, {rows}"
        if values:
            about = "over the probe; mean over the seeds; ends of the 95% t interval over them"
            curves[tag] = Curve("Share of the lookup" if key == "share" else "Cosine", title, about, values)
    return curves


def _in_charts(names: Sequence[str], baseline: str) -> dict[str, list[int]]:
    """The numbers of the charts in which an arm stands, so that none has too many lines; the baseline is in all."""
    others = [name for name in names if name != baseline]
    found = {name: [k // (LINES - 1)] for k, name in enumerate(others)}
    return found | {baseline: list(range(max(1, -(-len(others) // (LINES - 1)))))}


def _point(place: Path) -> str:
    """The name of a comparison that is a point of a sweep. Its charts have tags of their own, since a chart shows a tag
    of all runs in which it stands."""
    return place.name if (place.parent / SWEEP).exists() else ""


def _name(tag: str, point: str, chart: int) -> str:
    return "/".join(["seeds", *filter(None, (point, str(chart + 1) if chart else "")), tag])


def write_mean_runs(place: Path, found: Found, runs: Mapping[str, Sequence[Run]]) -> None:
    """Write `mean/<arm>` of a finished comparison, with what the verdict speaks of, over all of the training.

    Each has the tags that the seeds' runs have, and `seeds/<tag>/{mean,low,high}`, of which the charts are made; at a
    point of a sweep `seeds/<point>/<tag>/...`.
    """
    if found.clusters is None:
        return
    point = _point(place)
    heldout = {name: Heldout.of_runs(of_arm, found.clusters.kind) for name, of_arm in runs.items()}
    layout: dict[str, Charts] = {}
    for name, charts in _in_charts(list(runs), found.baseline).items():
        if name not in runs:
            continue
        arm = found.arms[name]
        curves = _losses(found, heldout, name)
        curves |= _splits(runs[name], [band for band in NAMES if band in arm.bands]) if arm.tied else {}
        events = [(0, Summary(value=[size_of(arm.parameters)]))]
        for tag, curve in curves.items():
            names = [_name(tag, point, chart) for chart in charts]
            for one, chart in zip(names, charts, strict=True):
                title = curve.title + f", at {point}" * bool(point) + f" ({chart + 1})" * bool(chart)
                layout.setdefault(curve.chart, {})[title] = [
                    "Margin",
                    [f"{one}/{end}" for end in ("mean", "low", "high")],
                ]
            events += [(step, _event(tag, names, curve, one)) for step, one in curve.estimates.items()]
        folder = place / MEAN / name
        folder.mkdir(parents=True, exist_ok=True)
        write_events(folder, MEAN, events)
    write_events(place / MEAN / next(iter(runs)), CHARTS, [(0, summary.custom_scalars(laid_out(layout)))])


def laid_out(layout: Mapping[str, Charts]) -> dict[str, Charts]:
    """Charts by category, in the order in which they are to be shown, as TensorBoard wants them: it shows those of a
    category from the last to the first."""
    return {category: dict(reversed(layout[category].items())) for category in CATEGORIES if category in layout}


def _event(tag: str, names: Sequence[str], curve: Curve, one: Estimate) -> Summary:
    low, high = one.shown or (one.mean, one.mean)
    about = f"{curve.title}: {curve.about}. {ENDS}"
    values = {card_of(tag, {}).tag: one.mean}
    for name in names:
        values |= {f"{name}/mean": one.mean, f"{name}/low": low, f"{name}/high": high}
    return Summary(
        value=[described(t, "scalars", about, simple_value=v) for t, v in values.items() if math.isfinite(v)]
    )


def size_of(parameters: int) -> Summary.Value:
    """The scalar that says how large a model is."""
    return described("size/parameters", "scalars", "Learned numbers of the model", simple_value=parameters)
