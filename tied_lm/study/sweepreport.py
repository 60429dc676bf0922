"""The results of a sweep as sentences, one table and one figure."""

import html
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from tied_lm.intervals import Estimate
from tied_lm.study.ownbest import FEWEST_SEEDS
from tied_lm.study.report import COLORS, html_table, new_figure, svg, write_page
from tied_lm.study.sweep import short_names, show
from tied_lm.study.sweepresults import Combination, Results, Settings
from tied_lm.study.verdict import with_interval

PAGE = "sweep.html"
MARKERS = "os^Dv"
OWN = "own best"


def _settings(settings: Settings) -> str:
    names = short_names(list(settings))
    return ", ".join(f"{names[field]}={show(value)}" for field, value in settings.items())


def _mean(loss: Estimate | None) -> str:
    return "diverged" if loss is None else f"{loss.mean:.4f}"


def table_rows(results: Results) -> list[list[str]]:
    """Each arm against the baseline at each point; for a grid of rates also with each arm at its own best.

    A star marks the rate that is best for the baseline.
    """
    baseline, names = results.baseline, short_names(list(results.grid))
    others = [arm for arm in results.arms if arm != baseline]
    best = {combination.best_for_baseline for combination in results.combinations}
    rows = [[*names.values(), "arm", f"less {baseline}", "held-out loss", f"that of {baseline}", "parameters"]]
    for point in results.points:
        star = " *" if point.index in best else ""
        cells = [show(value) + (star if f in results.rates else "") for f, value in point.settings.items()]
        for arm in others:
            losses = [_mean(point.eval_loss[name]) for name in (arm, baseline)]
            parameters = f"{point.parameters[arm]:,}"
            rows.append([*cells, arm, with_interval(point.differences[arm], "+"), *losses, parameters])
    for combination in results.combinations:
        for arm in others:
            own, base = combination.own[arm], combination.own[baseline]
            edges = {field for values in (own, base) if values is not None for field in values.at_edge}
            cells = [
                show(combination.settings[field])
                if field in combination.settings
                else OWN + (" (edge)" if field in edges else "")
                for field in names
            ]
            losses = [_mean(values.eval_loss if values else None) for values in (own, base)]
            parameters = f"{combination.parameters[arm]:,}"
            rows.append([*cells, arm, with_interval(own.difference if own else None, "+"), *losses, parameters])
    return rows


def _own_best(combination: Combination, rates: list[str]) -> str:
    """Which rates are best for each arm of one combination, and whether the grid reaches beyond them."""
    names, ends = short_names(rates), []
    for arm, own in combination.own.items():
        if own is None:
            ends.append(f"{arm} diverged at every one")
            continue
        edges = [names[field] for field in own.at_edge]
        edge = f" (at the edge of the grid in {' and '.join(edges)}: a better one may lie beyond)" if edges else ""
        ends.append(f"{arm} at {_settings(own.rates)}{edge}")
    where = f"With {_settings(combination.settings)}: b" if combination.settings else "B"
    return f"{where}est rates: {'; '.join(ends)}."


def sentences(results: Results) -> list[str]:
    """What the table means, and what it leaves open."""
    seeds = results.seeds
    said = [
        f"Held-out losses in nats a token at the last step, over {seeds} {'seeds' if seeds > 1 else 'seed'}; "
        + (
            "in brackets the 95% interval over seeds and held-out text; differences are paired by both."
            if seeds > 1
            else "no interval."
        )
    ]
    if results.matched:
        said.append(
            f"Arms were widened or narrowed to match the parameters of {results.baseline} within 1%; each point's "
            "report.html says how."
        )
    if results.rates:
        how = (
            'In the rows "own best" each arm has its own rate: half of the seeds choose it and the others are measured '
            "at it, in turns, so that no loss helped to choose its own rate; "
            + (
                "the interval is that of a permutation test, in which the arms are swapped within seeds and choose "
                "anew."
                if seeds >= FEWEST_SEEDS
                else f"with fewer than {FEWEST_SEEDS} seeds they describe, and tell no arms apart."
            )
            if seeds > 1
            else 'In the rows "own best" each arm has its own rate, chosen on the very seed that is compared, which '
            "flatters all arms: more seeds (--config.compare.seeds=5) choose fairly and give an interval."
        )
        said += [f"* is the rate that is best for {results.baseline}.", how]
        said += [_own_best(combination, results.rates) for combination in results.combinations]
    diverged = [f"{arm} at {_settings(point.settings)}" for point in results.points for arm in point.diverged]
    if diverged:
        counted = ", and count as an infinite loss when rates are chosen" if results.rates else ""
        said.append(f"Diverged in some seed{counted}: {'; '.join(diverged)}.")
    return said


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Line = list[tuple[str, Estimate]]  # the value of the field on the x axis, and the difference there


def _lines(entries: list[tuple[str, Settings, Estimate | None]], field: str) -> dict[str, Line]:
    """Entries (arm, settings, difference) as lines over one field, one for each arm and combination of the others."""
    lines: dict[str, Line] = {}
    for arm, settings, difference in entries:
        if difference is not None:
            rest = _settings({f: value for f, value in settings.items() if f != field})
            lines.setdefault(f"{arm}, {rest}" if rest else arm, []).append((show(settings.get(field, OWN)), difference))
    return lines


def _errors(differences: list[Estimate]) -> Float[np.ndarray, "2 points"]:
    """How far the intervals reach below and above the means; NaN where there is none."""
    reach = [
        (math.nan, math.nan) if d.shown is None else (d.mean - d.shown[0], d.shown[1] - d.mean) for d in differences
    ]
    return np.array(reach, float).T


def _axis(results: Results) -> tuple[str, dict[str, float], bool]:
    """The field on the x axis, the place of each of its values there, and whether the axis is logarithmic."""
    grid = results.grid
    field = next((f for f, values in grid.items() if all(map(_is_number, values))), next(iter(grid)))
    values = grid[field]
    if not all(map(_is_number, values)):
        return field, {show(value): float(i) for i, value in enumerate(values)}, False
    return field, {show(value): float(value) for value in values}, min(values) > 0 and max(values) >= 10 * min(values)


def _figure(results: Results) -> Figure:
    """The difference to the baseline against the first numeric field, one line for each combination of the others."""
    field, at, logarithmic = _axis(results)
    shared = _lines(
        [(arm, point.settings, d) for point in results.points for arm, d in point.differences.items()], field
    )
    own = _lines(
        [
            (arm, combination.settings, values.difference)
            for combination in results.combinations
            for arm, values in combination.own.items()
            if values is not None
        ],
        field,
    )
    figure, (ax,) = new_figure(1, 5)
    ax.axhline(0, color="#888", lw=1)
    styles = itertools.cycle([(color, marker) for marker in MARKERS for color in COLORS[:-1]])
    style_of = dict(zip(shared, styles, strict=False))
    low, high = min(at.values()), max(at.values())
    span = high - low or 1.0
    step = 0.03 / max(len(shared), 4)  # of the axis, from line to line, so that no interval hides another

    def draw(line: Line, number: int, **style: Any) -> None:
        line = sorted(line, key=lambda pair: at[pair[0]])
        shift = step * (number - (len(shared) - 1) / 2)
        places = [at[value] for value, _ in line]
        x = [place * (high / low) ** shift if logarithmic else place + shift * span for place in places]
        differences = [difference for _, difference in line]
        ax.errorbar(x, [d.mean for d in differences], _errors(differences), capsize=3, **style)

    over_rates = field in results.rates
    for number, (name, line) in enumerate(shared.items()):
        color, marker = style_of[name]
        faint = 0.5 if own and not over_rates else 1.0  # where the lines at the arms' own rates matter more
        draw(line, number, fmt=f"{marker}-", color=color, label=name, lw=1.3, ms=5, alpha=faint)
    if own and over_rates:
        at[OWN] = high * (high / low) ** 0.12 if logarithmic else high + 0.12 * span
    for number, (name, line) in enumerate(own.items()):
        if over_rates:
            color = style_of[name][0] if name in style_of else COLORS[-1]
            draw(line, number, fmt="s", color=color, ms=6)
        else:
            label = f"{name}, each at its own best rate"
            draw(line, len(shared) + number, fmt="s--", color=COLORS[-1], label=label, lw=2, ms=6)
    ax.set(xlabel=field, ylabel=f"held-out loss: difference to {results.baseline}, nats a token")
    if logarithmic:
        ax.set_xscale("log")
    ax.set_xticks(list(at.values()), list(at))
    ax.minorticks_off()
    if len(shared) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def write_sweep_page(place: Path, results: Results) -> None:
    """Write sweep.html into the folder of a finished sweep."""
    others = " and ".join(arm for arm in results.arms if arm != results.baseline)
    title = f"{others} against {results.baseline} over {', '.join(results.grid)}"
    notes = "".join(f"<p class=note>{html.escape(sentence)}</p>" for sentence in sentences(results))
    table = f"<div class=wide>{html_table(table_rows(results))}</div>"
    write_page(place / PAGE, title, [svg(_figure(results)), table, notes])
