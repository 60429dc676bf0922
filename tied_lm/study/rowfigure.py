"""What each use asks of each row, by the rank of its frequency."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from tied_lm.rows import FIELDS, PARTS
from tied_lm.study.palette import COLORS, Style, part_style
from tied_lm.study.picture import Key, Picture, Section, few_ticks, panel, plain_log
from tied_lm.study.subject import ArmRuns, Probed, Subject

MOST_ROWS = 1000  # that are drawn one by one
MOST_CLOUDS = 2  # arms whose rows are drawn one by one in one panel
BINS = 40  # of the logarithm of the rank


class Binned(NamedTuple):
    """Rows in bins of the logarithm of their rank (G): the mean rank, and quantiles of what is defined."""

    rank: Float[np.ndarray, "G"]
    quantiles: Float[np.ndarray, "G Q"]
    rows: Int[np.ndarray, "G"]


def binned(
    values_V: Float[np.ndarray, "V"], quantiles: tuple[float, ...] = (0.1, 0.5, 0.9), bins: int = BINS
) -> Binned:
    """Values that lie in the order of their rank, from 1 on; NaN is left out."""
    rank_V = np.arange(1, values_V.size + 1)
    number_V = np.minimum((np.log(rank_V) / np.log(values_V.size + 1) * bins).astype(int), bins - 1)
    rank, found, count = [], [], []
    for number in np.unique(number_V):
        of = (number_V == number) & np.isfinite(values_V)
        if of.any():
            rank.append(np.exp(np.log(rank_V[of]).mean()))
            found.append(np.quantile(values_V[of], quantiles))
            count.append(np.count_nonzero(of))
    return Binned(np.array(rank), np.array(found).reshape(-1, len(quantiles)), np.array(count, int))


def mean_rows(probed: list[Probed], field: str) -> Float[np.ndarray, "V"]:
    """A field at the last step as the mean over the runs in which it is defined, by falling frequency."""
    order = np.argsort(-probed[0].frequency, kind="stable")
    values = np.array([one.share if field == "share" else one.last[field] for one in probed])[:, order]
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0).sum(axis=0) / known.sum(axis=0)


def _scatter(
    ax: Axes, values_V: Float[np.ndarray, "V"], style: Style, gid: str | None = None, most: int = MOST_ROWS
) -> None:
    """Rows as points; of more than `most` the median and the range of the middle 80% of those of like rank."""
    artists: list[Artist] = []
    if values_V.size <= most:
        rank = np.arange(1, values_V.size + 1)
        known = np.isfinite(values_V)
        artists += ax.plot(rank[known], values_V[known], style.marker, ms=2.6, mew=0, color=style.light, alpha=0.75)
    else:
        found = binned(values_V)
        low, middle, high = found.quantiles.T
        artists += [
            *ax.plot(found.rank, middle, color=style.light, marker=style.marker, ms=2.6, lw=1.4),
            ax.fill_between(found.rank, low, high, color=style.light, alpha=0.15, lw=0),
        ]
    for artist in artists if gid else ():
        artist.set_gid(gid)


def _norms(arm: ArmRuns) -> tuple[Axes, Picture]:
    figure, ax = panel(xscale="log", yscale="log", title=arm.name, xlabel="rank by frequency", ylabel="row norm")
    told = []
    for part in PARTS:
        if FIELDS[part].hypothetical and arm.untied_from is not None:
            continue
        values_V = mean_rows(arm.probed, part)
        values_V = np.where(values_V > 0, values_V, np.nan)
        if np.isfinite(values_V).any():
            _scatter(ax, values_V, part_style(part))
            told.append(f"{part} {np.nanmedian(values_V):.2g}")
    plain_log(ax.xaxis)
    return ax, Picture(figure, f"Row norms against rank by frequency, {arm.name}; medians: {', '.join(told)}.")


def rows_by_rank(subject: Subject) -> Section | None:
    """Share, cosine and norms of every row at the last step."""
    arms = [arm for arm in subject.arms.values() if arm.probed]
    if not arms:
        return None
    tied = [arm for arm in arms if arm.untied_from is None]
    pictures = []
    for key, words in {"share": "lookup's share", "cosine": "cosine"}.items() if tied else ():
        figure, ax = panel(xscale="log", xlabel="rank by frequency", ylabel=words)
        ax.set_ylim(*((-0.03, 1.03) if key == "share" else (-1.05, 1.05)))
        told = []
        for arm in tied:
            values_V = mean_rows(arm.probed, key)
            # Points of many arms would hide each other.
            _scatter(ax, values_V, arm.style, f"arm={arm.name}", MOST_ROWS if len(tied) <= MOST_CLOUDS else 0)
            if np.isfinite(values_V).any():
                told.append(f"{arm.name} {np.nanmedian(values_V):.3f}")
        if key == "cosine":
            ax.axhline(0, color=COLORS["muted"][0], lw=1)
        few_ticks(ax.yaxis, 5)
        plain_log(ax.xaxis)
        pictures.append(Picture(figure, f"The {words} of each row against its rank; medians: {', '.join(told)}."))
    panels = [_norms(arm) for arm in arms]
    low, high = (end(ax.get_ylim()[k] for ax, _ in panels) for k, end in enumerate((min, max)))
    for ax, picture in panels:
        ax.set_ylim(low, high)
        plain_log(ax.yaxis)
        pictures.append(picture)
    rows = arms[0].probed[0].frequency.size
    shown = "Median of the rows of like rank, and the middle 80% of them"
    if rows <= MOST_ROWS:
        shown = "Each point is a row" + (f" (share and cosine: {shown.lower()})" if len(tied) > MOST_CLOUDS else "")
    note = (
        f"{shown}, mean over seeds, at the last probe. Row norm: L2 norm of the row's part of the gradient, nats / "
        "parameter; what is 0 is left out. In an untied model lookup and scoring belong to two matrices, so there is "
        "neither a total nor a share."
    )
    keys = [Key(arm.name, arm.style, lined=False) for arm in tied]
    keys += [Key(part, part_style(part), lined=False) for part in PARTS]
    return Section("What each use asks of each row", note, pictures, keys)
