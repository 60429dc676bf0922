"""The results of a sweep as sentences, one table and one figure."""

import html
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tied_lm.intervals import Difference, Estimate
from tied_lm.study.ownbest import fewest_seeds
from tied_lm.study.page import COLORS, html_table, new_figure, svg, write_page
from tied_lm.study.sweep import short_names, show
from tied_lm.study.sweepresults import Combination, Results, Settings
from tied_lm.study.verdict import looks, table, with_interval

PAGE = "sweep.html"
MARKERS = "os^Dv"
OWN = "own best"
CAVEAT = " !"
MOST_CAVEATS = 8  # that the terminal shows


def _settings(settings: Settings) -> str:
    names = short_names(list(settings))
    return ", ".join(f"{names[field]}={show(value)}" for field, value in settings.items())


def _mean(loss: Estimate | None) -> str:
    return "diverged" if loss is None else f"{loss.mean:.4f}"


def _outcome(difference: Difference | None, with_caveats: bool = False) -> str:
    said = (difference and difference.outcome) or "-"
    return said + CAVEAT if with_caveats else said


def table_rows(results: Results) -> list[list[str]]:
    """Each arm against the baseline at each point; for a grid of rates also with each arm at its own best.

    A star marks the rate that is best for the baseline, an exclamation mark arms about which there are caveats.
    """
    baseline, names = results.baseline, short_names(list(results.grid))
    others = [arm for arm in results.arms if arm != baseline]
    best = {combination.best_for_baseline for combination in results.combinations}
    head = ["arm", f"less {baseline}", "outcome", "held-out loss", f"that of {baseline}", "parameters"]
    rows = [[*names.values(), *head]]
    for point in results.points:
        star = " *" if point.index in best else ""
        cells = [show(value) + (star if f in results.rates else "") for f, value in point.settings.items()]
        for arm in others:
            difference, doubt = point.differences[arm], any(point.caveats.get(name) for name in (arm, baseline))
            losses = [_mean(point.eval_loss[name]) for name in (arm, baseline)]
            said = [with_interval(difference, "+"), _outcome(difference, doubt)]
            rows.append([*cells, arm, *said, *losses, f"{point.parameters[arm]:,}"])
    for combination in results.combinations:
        for arm in others:
            own, base = combination.own[arm], combination.own[baseline]
            edges = {field for found in (own, base) if found is not None for field in found.at_edge}
            cells = [
                show(combination.settings[field])
                if field in combination.settings
                else OWN + (" (edge)" if field in edges else "")
                for field in names
            ]
            difference = own.difference if own else None
            losses = [_mean(found.eval_loss if found else None) for found in (own, base)]
            said = [with_interval(difference, "+"), _outcome(difference)]
            rows.append([*cells, arm, *said, *losses, f"{combination.parameters[arm]:,}"])
    return rows


def _intervals(results: Results) -> str:
    """What the intervals of the points cover."""
    losses = "Held-out losses in nats a token at the last step; in brackets the 95% interval"
    if results.seeds == 1:
        return f"{losses} over the held-out text alone: it says nothing of other seeds."
    count = sum(found is not None for point in results.points for found in point.differences.values())
    together = f"; all {count} hold at once" if count > 1 else ""
    return f"{losses} over {results.seeds} seeds and held-out text, by both of which differences are paired{together}."


def _against_margin(results: Results) -> list[str]:
    """What the outcomes mean, and what would decide the open ones."""
    if results.seeds == 1:
        return []
    margin = f"{results.margin:g} nats (compare.margin)"
    said = [
        f"Outcome: better or worse by more than {margin}; equal, for practical purposes, within that; differs, perhaps "
        "by less than that; undecided, not told apart."
    ]
    found = [d for point in results.points for d in point.differences.values() if d and d.outcome == "undecided"]
    if found:
        seeds = [difference.seeds_to_decide for difference in found]
        enough = max((count for count in seeds if count is not None), default=0)
        which = "some of them" if None in seeds else "them"
        more = [f"about {enough:,} seeds (--config.compare.seeds={enough}) would decide {which}"] if enough else []
        if None in seeds:
            more.append(
                f"no number of seeds decides {'the others' if enough else 'them'}, since the held-out tokens vary too "
                "much: raise data.eval_tokens, or hold out more text"
            )
        said.append(f"{len(found)} undecided: {'; '.join(more)}.")
    return said


def _own_rates(results: Results) -> list[str]:
    """How arms are compared at their own best rates, and which these are."""
    if not results.rates:
        return []
    count = sum(bool(own and own.difference) for c in results.combinations for own in c.own.values())
    fewest = fewest_seeds(max(count, 1))
    test = "the interval is that of a permutation test, in which the arms are swapped within seeds and choose anew"
    if fewest is None or results.seeds < fewest:
        few = "for so many rows" if fewest is None else f"with fewer than {fewest} seeds"
        test = f"{few} they describe, and tell no arms apart"
    elif count > 1:
        test += f"; all {count} hold at once"
    how = (
        'In the rows "own best" each arm has its own rate: half of the seeds choose it and the others are measured '
        f"at it, in turns, so that no loss helped to choose its own rate; {test}."
        if results.seeds > 1
        else 'In the rows "own best" each arm has its own rate, chosen on the very seed that is compared, which '
        "flatters all arms: more seeds (--config.compare.seeds=5) choose fairly and give an interval."
    )
    rates = [_own_best(combination, results.rates) for combination in results.combinations]
    return [f"* is the rate that is best for {results.baseline}.", how, *rates]


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
    """What the table means, and what it leaves open; the caveats come after them."""
    said = [_intervals(results), *_against_margin(results), *looks(results.looks)]
    if results.matched:
        said.append(
            f"Arms were changed to come near the number of parameters of {results.baseline} (compare.match); each "
            "point's report.html says how, and how near."
        )
    said += _own_rates(results)
    diverged = [f"{arm} at {_settings(point.settings)}" for point in results.points for arm in point.diverged]
    if diverged:
        counted = ", and count as an infinite loss when rates are chosen" if results.rates else ""
        said.append(f"Diverged in some seed{counted}: {'; '.join(diverged)}.")
    if caveats(results):
        said.append(f"{CAVEAT.strip()} marks arms of which there is more to know:")
    return said


def caveats(results: Results) -> list[str]:
    """What the curves of each point say against its losses, which an exclamation mark points to."""
    return [
        f"{_settings(point.settings)}: {sentence}"
        for point in results.points
        for of_arm in point.caveats.values()
        for sentence in of_arm
    ]


def told_sweep(results: Results) -> str:
    """Table, sentences and the first caveats, for the terminal."""
    found = caveats(results)
    more = [f"... and {len(found) - MOST_CAVEATS:,} more, in {PAGE}"] if len(found) > MOST_CAVEATS else []
    return "\n".join([table(table_rows(results)), "", *sentences(results), *found[:MOST_CAVEATS], *more])


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


def _axis(results: Results) -> tuple[str, dict[str, float], bool]:
    """The field on the x axis, the place of each of its values there, and whether the axis is logarithmic."""
    grid = results.grid
    field = next((f for f, values in grid.items() if all(map(_is_number, values))), next(iter(grid)))
    values = grid[field]
    if not all(map(_is_number, values)):
        return field, {show(value): float(i) for i, value in enumerate(values)}, False
    return field, {show(value): float(value) for value in values}, min(values) > 0 and max(values) >= 10 * min(values)


def _draw(ax: Axes, x: list[float], differences: list[Estimate], **style: Any) -> None:
    reach = [(d.mean - d.shown[0], d.shown[1] - d.mean) if d.shown else (math.nan, math.nan) for d in differences]
    ax.errorbar(x, [d.mean for d in differences], np.array(reach).T, capsize=3, **style)


def _figure(results: Results) -> Figure:
    """The difference to the baseline against the first numeric field, one line for each combination of the others."""
    field, at, logarithmic = _axis(results)
    shared = _lines([(arm, p.settings, d) for p in results.points for arm, d in p.differences.items()], field)
    own = _lines(
        [(arm, c.settings, best.difference) for c in results.combinations for arm, best in c.own.items() if best], field
    )
    figure, (ax,) = new_figure(1, 5)
    ax.axhline(0, color="#888", lw=1)
    if results.seeds > 1:
        ax.axhspan(-results.margin, results.margin, color="#888", alpha=0.15, lw=0, label="within the margin")
    styles = itertools.cycle([(color, marker) for marker in MARKERS for color in COLORS[:-1]])
    style_of = dict(zip(shared, styles, strict=False))
    low, high = min(at.values()), max(at.values())
    span = high - low or 1.0
    step = 0.03 / max(len(shared), 4)  # of the axis, from line to line, so that no interval hides another

    def places(line: Line, number: int) -> list[float]:
        shift = step * (number - (len(shared) - 1) / 2)
        return [at[value] * (high / low) ** shift if logarithmic else at[value] + shift * span for value, _ in line]

    over_rates = field in results.rates
    for number, (name, line) in enumerate(shared.items()):
        line.sort(key=lambda pair: at[pair[0]])
        color, marker = style_of[name]
        faint = 0.5 if own and not over_rates else 1.0  # where the lines at the arms' own rates matter more
        style = {"fmt": f"{marker}-", "color": color, "label": name, "lw": 1.3, "ms": 5, "alpha": faint}
        _draw(ax, places(line, number), [d for _, d in line], **style)
    if own and over_rates:
        at[OWN] = high * (high / low) ** 0.12 if logarithmic else high + 0.12 * span
    for number, (name, line) in enumerate(own.items()):
        line.sort(key=lambda pair: at[pair[0]])
        style = {"fmt": "s", "color": style_of[name][0] if name in style_of else COLORS[-1], "ms": 6}
        if not over_rates:
            label = f"{name}, each at its own best rate"
            style = {"fmt": "s--", "color": COLORS[-1], "label": label, "lw": 2, "ms": 6}
        _draw(ax, places(line, number if over_rates else len(shared) + number), [d for _, d in line], **style)
    ax.set(xlabel=field, ylabel=f"held-out loss: difference to {results.baseline}, nats a token")
    if logarithmic:
        ax.set_xscale("log")
    ax.set_xticks(list(at.values()), list(at))
    ax.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def write_sweep_page(place: Path, results: Results) -> None:
    """Write sweep.html into the folder of a finished sweep."""
    others = " and ".join(arm for arm in results.arms if arm != results.baseline)
    title = f"{others} against {results.baseline} over {', '.join(results.grid)}"
    notes = "".join(f"<p class=note>{html.escape(sentence)}</p>" for sentence in sentences(results))
    more = "".join(f"<li>{html.escape(caveat)}</li>" for caveat in caveats(results))
    rows = f"<div class=wide>{html_table(table_rows(results))}</div>"
    write_page(place / PAGE, title, [svg(_figure(results)), rows, notes, f"<ul class=note>{more}</ul>" if more else ""])
