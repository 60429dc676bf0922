"""Pictures of a page: small figures in one style, which take the colours of the page."""

import dataclasses
import html
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tied_lm.intervals import Estimate, Scale, summarize
from tied_lm.study.palette import COLORS, HYPOTHETICAL, OTHER_MATRIX, Style

WIDE, SMALL = (4.6, 3.3), (2.7, 2.35)  # inches
FEW_POINTS = 15  # of a curve, up to which each is marked
FEW_SEEDS = 4  # below which each seed is a point, since a 95% interval would say more of t than of the seeds
UNDEFINED = Estimate(math.nan, None, ())
SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
}
DASHES = {"-": "", "--": "5 3", OTHER_MATRIX: "6 2 1.5 2", HYPOTHETICAL: "1.5 2.5"}
# Of a marker in the key, around the origin.
SHAPES = {
    "o": "M3.5 0A3.5 3.5 0 1 1-3.5 0A3.5 3.5 0 1 1 3.5 0Z",
    "s": "M-3-3H3V3H-3Z",
    "^": "M0-4L4 3H-4Z",
    "D": "M0-4.4L4.4 0L0 4.4L-4.4 0Z",
    "v": "M0 4L4-3H-4Z",
    "P": "M-1.3-4H1.3V-1.3H4V1.3H1.3V4H-1.3V1.3H-4V-1.3H-1.3Z",
    "X": "M-4-2.4L-2.4-4L0-1.6L2.4-4L4-2.4L1.6 0L4 2.4L2.4 4L0 1.6L-2.4 4L-4 2.4L-1.6 0Z",
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """One panel, and what it says to whom cannot see it."""

    figure: Figure
    alt: str


class Key(NamedTuple):
    """What a style stands for."""

    label: str
    style: Style
    marked: bool = True
    lined: bool = True


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, pictures side by side, what their styles stand for, and a note."""

    title: str
    note: str
    pictures: list[Picture]
    keys: list[Key] = dataclasses.field(default_factory=list)
    small: bool = False


def panel(size: tuple[float, float] = WIDE, **labels: Any) -> tuple[Figure, Axes]:
    """An empty panel in the style of all; `labels` are those of `Axes.set`."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=size)
        ax = figure.subplots()
        # In inches, so that panels of one size line up.
        left, right, bottom, top = 0.85, 0.22, 0.5, 0.28
        figure.subplots_adjust(left / size[0], bottom / size[1], 1 - right / size[0], 1 - top / size[1])
        figure.patch.set_alpha(0)
        ax.patch.set_alpha(0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color=COLORS["grid"][0], lw=0.8)
        ax.set_axisbelow(True)
        for spine in ax.spines.values():
            spine.set_color(COLORS["muted"][0])
        ax.tick_params(color=COLORS["muted"][0], labelcolor=COLORS["muted"][0])
        ax.set(**labels)
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            text.set_color(COLORS["ink"][0])
        # At the edge, whatever the ticks need.
        ax.yaxis.set_label_coords(-(left - 0.16) / (size[0] - left - right), 0.5)
    return figure, ax


def plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers: what browsers do with raised exponents differs."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0 and math.isfinite(high) else 0
    if decades < 1:
        few_ticks(axis, 4)
    else:
        axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0), numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def log_steps(ax: Axes, last: int) -> None:
    """An axis of updates on which the first ones have room, and 0 has a place."""
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(0, max(last, 1) * 1.15)
    ax.set_xlabel("updates")
    ax.xaxis.set_major_locator(FixedLocator([0, *(10.0**k for k in range(int(math.log10(max(last, 1))) + 1))]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value:.0e}"))


def few_ticks(axis: Any, count: int = 5) -> None:
    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]))


def joined(
    found: Sequence[tuple[Sequence[int], Float[np.ndarray, "T"]]],
) -> tuple[Float[np.ndarray, "U"], Float[np.ndarray, "S U"]]:
    """Values of some runs, each at its own steps, at the steps of any of them; NaN where a run has none."""
    steps = sorted({int(step) for of_run, _ in found for step in of_run})
    place = {step: k for k, step in enumerate(steps)}
    values = np.full((len(found), len(steps)), np.nan)
    for row, (of_run, given) in zip(values, found, strict=True):
        row[[place[int(step)] for step in of_run]] = given
    return np.array(steps, float), values


def estimates(values: Float[np.ndarray, "S T"], scale: Scale | None = None) -> list[Estimate]:
    """Mean and 95% t interval over the seeds that have a value, taken on a scale."""
    return [
        UNDEFINED if np.isnan(column).all() else summarize(column.tolist(), scale) for column in np.transpose(values)
    ]


def _line(ax: Axes, x: Float[np.ndarray, "T"], y: Float[np.ndarray, "T"], style: Style, name: str, **more: Any) -> None:
    marker = style.marker if 0 < np.count_nonzero(np.isfinite(y)) <= FEW_POINTS else ""
    given: dict[str, Any] = {"lw": 1.6, "ms": 3.5, "ls": style.line, "marker": marker, **more}
    (line,) = ax.plot(x, y, color=style.light, **given)
    line.set_gid(name)


def curve(
    ax: Axes,
    x: Float[np.ndarray, "T"],
    found: Sequence[Estimate],
    style: Style,
    arm: str,
    until: int | None = None,
) -> None:
    """Means, with their 95% intervals as a shade; of fewer than four seeds with a point for each seed.

    Args:
        until: the step from which on it has no meaning, and is dotted.
    """
    mean, gid = np.array([one.mean for one in found]), f"arm={arm}"
    meant = np.full(x.size, True) if until is None else x <= until
    _line(ax, x[meant], mean[meant], style, gid)
    if not meant.all():
        rest = np.flatnonzero(~meant)
        rest = np.concatenate([rest[:1] - 1, rest]) if rest[0] else rest
        _line(ax, x[rest], mean[rest], style._replace(line=HYPOTHETICAL), gid)
    seeds = max((len(one.per_seed) for one in found), default=0)
    if seeds >= FEW_SEEDS:
        low, high = np.array([one.shown or (math.nan, math.nan) for one in found]).T
        ax.fill_between(x, low, high, color=style.light, alpha=0.2, lw=0).set_gid(gid)
    elif seeds > 1:
        _points(ax, x, found, style, gid)


def _points(ax: Axes, x: Float[np.ndarray, "T"], found: Sequence[Estimate], style: Style, gid: str) -> None:
    """A point for each seed."""
    pairs = [(at, value) for at, one in zip(x, found, strict=True) for value in one.per_seed if value is not None]
    if pairs:
        at, values = np.array(pairs, float).T
        (points,) = ax.plot(at, values, ".", ms=4, mew=0, color=style.light, alpha=0.6)
        points.set_gid(gid)


def by_band(ax: Axes, bands: Sequence[str], values: Sequence[tuple[str, Style, Sequence[Estimate]]]) -> None:
    """Means in each band, side by side, with 95% intervals; of fewer than four seeds with a point for each.

    Args:
        values: arm, style, and the estimates by band.
    """
    for i, (arm, style, found) in enumerate(values):
        x = np.arange(len(bands)) + min(0.16, 0.7 / len(values)) * (i - (len(values) - 1) / 2)
        mean, gid = np.array([one.mean for one in found]), f"arm={arm}"
        face = style.light if style.line == "-" else "none"
        (points,) = ax.plot(x, mean, ls="", marker=style.marker, ms=5, color=style.light, markerfacecolor=face)
        points.set_gid(gid)
        if max(len(one.per_seed) for one in found) < FEW_SEEDS:
            _points(ax, x, found, style, gid)
            continue
        low, high = np.array([one.shown or (math.nan, math.nan) for one in found]).T
        ax.vlines(x, low, high, color=style.light, lw=1.4, ls=style.line).set_gid(gid)
    ax.set_xticks(range(len(bands)), bands)
    ax.set_xlim(-0.5, len(bands) - 0.5)
    ax.set_xlabel("band (0: most frequent rows)")


def svg(picture: Picture) -> str:
    """A picture as an element of a page, in the page's colours and letters."""
    buffer = io.StringIO()
    # A fixed salt, so that one picture always gives one file; no two pictures of a page share their names.
    with mpl.rc_context({**SETTINGS, "svg.hashsalt": picture.alt}):
        picture.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r' id="arm=([^"]*)"', r' data-arm="\1"', text)
    text = re.sub(r' id="[A-Za-z]\w*_\d+"', "", text)  # the same names in every picture, to which nothing refers
    text = re.sub(r"^<svg([^>]*?) width=\S+ height=\S+?([ >])", r"<svg\1\2", text)
    text = re.sub(r"<[^>]*>", lambda found: re.sub(r"(\d\.\d\d)\d+", r"\1", found[0]), text)
    text = _shared_styles(text)
    for name, (light, _) in COLORS.items():
        text = text.replace(light, f"var(--{name},{light})")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(picture.alt)}"', 1)


def _shared_styles(text: str) -> str:
    """The styles of markers, which are many, said once each."""
    styles: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        name = styles.setdefault(found[2], f"m{crc32(found[2].encode()):08x}")
        return f'{found[1]} class="{name}"/>'

    text = re.sub(r'(<use [^>]*?) style="([^"]*)"/>', named, text)
    rules = "".join(f".{name}{{{style}}}" for style, name in styles.items())
    return re.sub(r"<defs>", f"<style>{rules}</style><defs>", text, count=1) if rules else text


def _swatch(key: Key) -> str:
    color = f"var(--{key.style.color})"
    dash = DASHES[key.style.line]
    line = f'<path d="M1 7H33" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
    hollow = key.style.line == "--" and not key.lined
    fill = f'fill="none" stroke="{color}" stroke-width="1.4"' if hollow else f'fill="{color}"'
    mark = f'<path d="{SHAPES[key.style.marker]}" transform="translate(17 7)" {fill}/>'
    return (
        f'<svg class=swatch viewBox="0 0 34 14" aria-hidden="true">{line * key.lined}{mark * key.marked}</svg>'
        f"{html.escape(key.label)}"
    )


def legend(keys: Iterable[Key]) -> str:
    """What the styles stand for, as a list that wraps."""
    items = "".join(f"<li>{_swatch(key)}</li>" for key in keys)
    return f"<ul class=legend>{items}</ul>" if items else ""


def section(one: Section) -> str:
    """A section of a page."""
    kind = "small" if one.small else {1: "one", 2: "two", 4: "two"}.get(len(one.pictures), "large")
    pictures = "".join(f"<div>{svg(picture)}</div>" for picture in one.pictures)
    return (
        f"<section><h2>{html.escape(one.title)}</h2><figure>{legend(one.keys)}<div class='panels {kind}'>{pictures}"
        f"</div><figcaption class=note>{html.escape(one.note)}</figcaption></figure></section>"
    )
