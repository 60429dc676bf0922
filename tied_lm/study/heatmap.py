"""Heat maps of the rows over training: rows by frequency, downwards; the probe's steps across."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from tied_lm.bands import NAMES
from tied_lm.record.events import Summary, described, write_events
from tied_lm.record.reader import Run
from tied_lm.rows import PARTS
from tied_lm.study.meanruns import MEAN

MOST_ROWS = 256  # of pixels; more rows of the vocabulary are binned
UNITS = {"share": "lookup's share", "cosine": "cosine of lookup and scoring"}


class Maps(NamedTuple):
    """Means over the seeds of an arm."""

    steps: list[int]
    values: dict[str, Float[np.ndarray, "T R"]]  # by statistic, most frequent rows first
    bands: Int[np.ndarray, "R"]
    rows: int  # of the vocabulary


def _mean(values: Sequence[Float[np.ndarray, "T R"]]) -> Float[np.ndarray, "T R"]:
    """Over those that are defined."""
    stack = np.array(values)
    count = np.isfinite(stack).sum(axis=0)
    return np.where(count > 0, np.nansum(stack, axis=0) / np.maximum(count, 1), np.nan)


def maps_of(runs: Sequence[Run], tied: bool) -> Maps:
    """What the probes of some runs say of each row. A bin has the root mean square of its rows' norms, and the share
    and the cosine of all of them together."""
    by_seed: list[dict[str, Float[np.ndarray, "T R"]]] = []
    for run in runs:
        with run.probe as probe:
            order = np.argsort(-probe["frequency"].values, kind="stable")
            size = min(order.size, MOST_ROWS)
            starts = np.arange(size) * order.size // size
            counts = np.diff([*starts, order.size])
            steps, bands = probe["step"].values.tolist(), probe["band"].values[order][starts]
            raw = {name: probe[name].values[:, order].astype(np.float64) for name in (*PARTS, "cosine")}
        squares = {part: np.add.reduceat(raw[part] ** 2, starts, axis=1) for part in PARTS}
        found = {part: np.sqrt(squares[part] / counts) for part in PARTS if tied or part != "total"}
        if tied:
            product = np.nan_to_num(raw["lookup"] * raw["scoring"] * raw["cosine"])
            sizes = np.sqrt(squares["lookup"] * squares["scoring"])
            with np.errstate(invalid="ignore", divide="ignore"):
                found["share"] = squares["lookup"] / (squares["lookup"] + squares["scoring"])
                found["cosine"] = np.add.reduceat(product, starts, axis=1) / np.where(sizes > 0, sizes, np.nan)
        by_seed.append(found)
    values = {name: _mean([one[name] for one in by_seed]) for name in by_seed[0]}
    return Maps(steps, values, bands, order.size)


def _scale(name: str, of_arms: Sequence[Maps]) -> tuple[Normalize, str]:
    """One scale of colours for all arms, so that they can be compared."""
    if name in UNITS:
        return (Normalize(0, 1), "PuOr") if name == "share" else (Normalize(-1, 1), "RdBu")
    shown = np.concatenate([found.values[name].ravel() for found in of_arms if name in found.values])
    shown = shown[shown > 0]
    low, high = np.quantile(shown, (0.01, 1.0)) if shown.size else (0.1, 1.0)
    return LogNorm(max(low, high / 1e6) * (0.5 if low == high else 1), high), "viridis"


def draw(found: Maps, name: str, title: str, scale: tuple[Normalize, str]) -> Figure:
    """One statistic as a picture."""
    values = found.values[name].T
    figure = Figure(figsize=(4.8, 3.8), dpi=130)
    ax = figure.add_axes((0.17, 0.17, 0.6, 0.74))
    ax.set_facecolor("#bbb")
    shown = np.ma.masked_invalid(values if name in UNITS else np.where(values > 0, values, np.nan))
    image = ax.imshow(shown, aspect="auto", interpolation="nearest", norm=scale[0], cmap=scale[1])
    ax.set_title(title, fontsize=10)
    ax.set_xticks(range(len(found.steps)), [f"{step:,}" for step in found.steps], rotation=45, fontsize=8)
    ax.set_xlabel("updates (the probe's steps)", fontsize=9)
    edges = np.flatnonzero(np.diff(found.bands)) + 0.5
    for edge in edges:
        ax.axhline(edge, color="white", lw=0.8)
    sides = [-0.5, *edges, values.shape[0] - 0.5]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(sides)]
    ax.set_yticks(middles, [f"band {NAMES[found.bands[int(np.ceil(m))]]}" for m in middles], fontsize=8)
    binned = "" if found.rows == values.shape[0] else f", in {values.shape[0]} bins"
    ax.set_ylabel(f"{found.rows:,} rows by frequency{binned}", fontsize=9)
    bar = figure.colorbar(image, cax=figure.add_axes((0.8, 0.17, 0.03, 0.74)))
    bar.set_label(UNITS.get(name, f"|{name}|, nats / parameter") + " (grey: none)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure


def write_heatmaps(place: Path, runs: Mapping[str, Sequence[Run]], tied: Mapping[str, bool]) -> None:
    """Write pictures of the rows into `mean/<arm>` of a finished comparison."""
    found = {name: maps_of(of_arm, tied[name]) for name, of_arm in runs.items()}
    scales = {name: _scale(name, list(found.values())) for name in ("share", "cosine", *PARTS)}
    for arm, of_arm in found.items():
        images = []
        for name in (name for name in scales if name in of_arm.values):
            seeds = f"{len(runs[arm])} seed" + "s" * (len(runs[arm]) > 1)
            figure, buffer = (
                draw(of_arm, name, f"{arm}: {name} of each row, mean of {seeds}", scales[name]),
                io.BytesIO(),
            )
            figure.savefig(buffer, format="png")
            width, height = (int(side * figure.dpi) for side in figure.get_size_inches())
            image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=buffer.getvalue())
            about = (
                f"{UNITS.get(name, f'L2 norm of the {name}, nats / parameter')}, of each row over the probe, by step"
            )
            images.append(described(f"rows_map/{name}", "images", about, image=image))
        write_events(place / MEAN / arm, "images", [(of_arm.steps[-1], Summary(value=images))])
