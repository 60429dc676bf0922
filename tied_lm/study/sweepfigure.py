"""What a sweep found, drawn over one field of its grid."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tied_lm.intervals import Estimate
from tied_lm.study.palette import ARM_MARKERS, COLORS, Style, arm_styles
from tied_lm.study.picture import WIDE, Key, Picture, Section, few_ticks, panel
from tied_lm.study.sweep import short_names, show
from tied_lm.study.sweepresults import Results, Settings

OWN = "own best"
LARGE = (5.0, 3.5)  # inches
Line = list[tuple[str, Estimate]]  # the value of the field on the x axis, and what stands there


def told_settings(settings: Settings) -> str:
    """The values of a point, by the last part of each field."""
    names = short_names(list(settings))
    return ", ".join(f"{names[field]}={show(value)}" for field, value in settings.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _lines(entries: Sequence[tuple[str, Settings, Estimate | None]], field: str) -> dict[tuple[str, str], Line]:
    """Entries (arm, settings, estimate) as lines over one field, by arm and the values of the other fields."""
    lines: dict[tuple[str, str], Line] = {}
    for arm, settings, found in entries:
        if found is not None:
            rest = told_settings({f: value for f, value in settings.items() if f != field})
            lines.setdefault((arm, rest), []).append((show(settings.get(field, OWN)), found))
    return lines


class _Axis:
    """The field on the x axis, the place of each of its values there, and whether the axis is logarithmic."""

    def __init__(self, results: Results):
        grid = results.grid
        self.field = next((f for f, values in grid.items() if all(map(_is_number, values))), next(iter(grid)))
        values = grid[self.field]
        numbers = all(map(_is_number, values))
        self.at = {show(value): float(value) if numbers else float(i) for i, value in enumerate(values)}
        self.log = numbers and min(values) > 0 and max(values) >= 10 * min(values)
        self.low, self.high = min(self.at.values()), max(self.at.values())

    def shifted(self, value: float, part: float) -> float:
        """A place moved by a part of the axis."""
        if self.log:
            return value * (self.high / self.low) ** part
        return value + part * (self.high - self.low or 1.0)

    def finish(self, ax: Axes) -> None:
        ax.set_xlabel(self.field)
        if self.log:
            ax.set_xscale("log")
        ax.set_xticks(list(self.at.values()), list(self.at))
        ax.minorticks_off()
        few_ticks(ax.yaxis)


def _draw(ax: Axes, x: list[float], found: list[Estimate], style: Style, arm: str, **more: Any) -> None:
    """Means with their intervals; of fewer than four seeds the interval only where it is all that there is."""
    (line,) = ax.plot(x, [one.mean for one in found], color=style.light, marker=style.marker, ls=style.line, **more)
    line.set_gid(f"arm={arm}")
    low, high = np.array([one.shown or (math.nan, math.nan) for one in found]).T
    ax.vlines(x, low, high, color=style.light, lw=1.3, alpha=more.get("alpha")).set_gid(f"arm={arm}")


def _styles(results: Results, lines: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Style]:
    """The colour of each line is its arm's; the values of the other fields have markers."""
    of_arm = arm_styles(results.arms)
    rests = list(dict.fromkeys(rest for _, rest in lines))
    if len(rests) < 2:
        return {line: of_arm[line[0]] for line in lines}
    markers = dict(zip(rests, itertools.cycle(ARM_MARKERS), strict=False))
    return {(arm, rest): of_arm[arm]._replace(marker=markers[rest]) for arm, rest in lines}


def differences(results: Results) -> Section:
    """The difference to the baseline over the first numeric field, a line for each arm and values of the others."""
    axis = _Axis(results)
    shared = _lines([(arm, p.settings, d) for p in results.points for arm, d in p.differences.items()], axis.field)
    chosen = [(arm, c.settings, best.difference) for c in results.combinations for arm, best in c.own.items() if best]
    own = _lines(chosen, axis.field)
    styles = _styles(results, list({**shared, **own}))
    figure, ax = panel(LARGE, ylabel=f"loss less that of {results.baseline}, nats a token")
    ax.axhline(0, color=COLORS["muted"][0], lw=1)
    if results.seeds > 1:
        ax.axhspan(-results.margin, results.margin, color=COLORS["muted"][0], alpha=0.18, lw=0)
    over_rates = axis.field in results.rates
    step = 0.03 / max(len(shared), 4)  # of the axis, from line to line, so that no interval hides another
    keys = []
    for number, (name, line) in enumerate(shared.items()):
        line.sort(key=lambda pair: axis.at[pair[0]])
        x = [axis.shifted(axis.at[value], step * (number - (len(shared) - 1) / 2)) for value, _ in line]
        faint = 0.5 if own and not over_rates else 1.0  # where the lines at the arms' own rates matter more
        _draw(ax, x, [d for _, d in line], styles[name], name[0], lw=1.4, ms=5, alpha=faint)
        keys.append(Key(", ".join(filter(None, name)), styles[name]))
    if own and over_rates:
        axis.at[OWN] = axis.shifted(axis.high, 0.12)
    for number, (name, line) in enumerate(own.items()):
        line.sort(key=lambda pair: axis.at[pair[0]])
        style = styles[name]._replace(line="none" if over_rates else "--")
        x = [axis.shifted(axis.at[value], step * (number + len(shared) * (not over_rates))) for value, _ in line]
        _draw(ax, x, [d for _, d in line], style, name[0], lw=2, ms=6.5)
        if not over_rates:
            keys.append(Key(f"{', '.join(filter(None, name))}, each at its own best rate", style))
    axis.finish(ax)
    ends = "; ".join(f"{', '.join(filter(None, n))}: {_numbers(line)}" for n, line in shared.items())
    alt = f"Held-out loss less that of {results.baseline} against {axis.field}. {ends}."
    note = "Bars: 95% interval. Within the grey band a difference does not matter (compare.margin)."
    return Section("The difference to the baseline", note, [Picture(figure, alt)], keys)


def _numbers(line: Line) -> str:
    return ", ".join(f"{found.mean:.4g} at {value}" for value, found in line)


def splits(results: Results) -> Section | None:
    """Share and cosine of the whole table at each point, of the arms that are tied."""
    axis, pictures, keys = _Axis(results), [], []
    values: dict[str, Callable[[Any], Estimate | None]] = {
        "lookup's share": lambda split: split.share,
        "cosine": lambda split: split.cosine,
    }
    for words, value in values.items():
        entries = [
            (arm, point.settings, value(split))
            for point in results.points
            for arm, split in point.splits.items()
            if split is not None
        ]
        lines = _lines(entries, axis.field)
        if not lines:
            return None
        styles = _styles(results, list(lines))
        figure, ax = panel(WIDE, ylabel=words)
        for name, line in lines.items():
            line.sort(key=lambda pair: axis.at[pair[0]])
            _draw(ax, [axis.at[v] for v, _ in line], [e for _, e in line], styles[name], name[0], lw=1.4, ms=5)
        ax.set_ylim(*((0, 1) if words != "cosine" else (-1, 1)))
        axis.finish(ax)
        ends = "; ".join(f"{', '.join(filter(None, n))}: {_numbers(line)}" for n, line in lines.items())
        pictures.append(Picture(figure, f"The {words}, all rows, against {axis.field}. {ends}."))
        keys = [Key(", ".join(filter(None, name)), styles[name]) for name in lines]
    note = "Of all rows, over the probe at the last step of each point. Bars: 95% t interval over seeds."
    return Section("The lookup against the scoring", note, pictures, keys)
