"""Heat maps of the rows over training: rows by frequency, downwards; the probe's steps across."""

import functools
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, Int
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import LogLocator, MaxNLocator
from PIL import Image, ImageDraw, ImageFont

from tied_lm.bands import NAMES
from tied_lm.record.events import Summary, described, write_events
from tied_lm.record.reader import Run
from tied_lm.rows import PARTS
from tied_lm.study.meanruns import MEAN

MOST_ROWS = 256  # of pixels; more rows of the vocabulary are binned
WIDTH, HEIGHT = 440, 360  # of a picture, pixels: TensorBoard shows it about 360 wide, so that it can be read
LEFT, TOP, RIGHT, BOTTOM = 78, 26, 322, 282  # of what is drawn in it
GREY = "#bbb"
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


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """The letters of the report's pictures."""
    return ImageFont.truetype(Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


def _write(image: Image.Image, at: tuple[float, float], text: str, anchor: str, size: int = 12, turn: int = 0) -> None:
    """Write a text at a place; turned by some degrees it has its middle (90) or its right end (45) there.

    Args:
        anchor: see Pillow's text anchors.
    """
    if not turn:
        ImageDraw.Draw(image).text(at, text, "black", _font(size), anchor)
        return
    left, top, right, bottom = _font(size).getbbox(text)
    label = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(label).text((1 - left, 1 - top), text, 255, _font(size))
    label = label.rotate(turn, Image.Resampling.BICUBIC, expand=True)
    x, y = at[0] - label.width / (2 if turn == 90 else 1), at[1] - label.height / 2 * (turn == 90)
    image.paste("black", (int(x), int(y)), label)


def _colored(values: Float[np.ndarray, "H W"], scale: tuple[Normalize, str], width: int, height: int) -> Image.Image:
    """Values as an area of colours, grey where there is none."""
    colors = mpl.colormaps[scale[1]].with_extremes(bad=GREY)(scale[0](np.ma.masked_invalid(values)), bytes=True)
    return Image.fromarray(colors[..., :3]).resize((width, height), Image.Resampling.NEAREST)


def _draw_bar(image: Image.Image, words: str, scale: tuple[Normalize, str]) -> None:
    """What the colours stand for."""
    norm, (left, right) = scale[0], (RIGHT + 14, RIGHT + 28)
    image.paste(_colored(norm.inverse(np.linspace(1, 0, 256))[:, None], scale, right - left, BOTTOM - TOP), (left, TOP))
    locator = LogLocator(numticks=7) if isinstance(norm, LogNorm) else MaxNLocator(4)
    for value in locator.tick_values(*norm.inverse(np.array([0.0, 1.0]))):
        y = BOTTOM - (BOTTOM - TOP) * float(norm(value))
        if TOP - 1 <= y <= BOTTOM + 1:
            ImageDraw.Draw(image).line((right, y, right + 4, y), "black")
            _write(image, (right + 7, y), f"{value:g}", "lm")
    _write(image, (WIDTH - 11, (TOP + BOTTOM) / 2), f"{words} (grey: none)", "mm", turn=90)


def draw(found: Maps, name: str, title: str, scale: tuple[Normalize, str]) -> Image.Image:
    """One statistic as a picture: made of pixels, since a figure of Matplotlib takes ten times as long."""
    values = found.values[name].T
    image, (rows, steps) = Image.new("RGB", (WIDTH, HEIGHT), "white"), values.shape
    lines, width, height = ImageDraw.Draw(image), RIGHT - LEFT, BOTTOM - TOP
    shown = values if name in UNITS else np.where(values > 0, values, np.nan)
    image.paste(_colored(shown, scale, width, height), (LEFT, TOP))
    _write(image, (WIDTH / 2, 5), title, "ma", 13)
    for k, step in enumerate(found.steps):
        x = LEFT + width * (k + 0.5) / steps
        lines.line((x, BOTTOM, x, BOTTOM + 4), "black")
        _write(image, (x + 5, BOTTOM + 5), f"{step:,}", "ra", 11, turn=45)
    _write(image, ((LEFT + RIGHT) / 2, HEIGHT - 4), "updates (the probe's steps)", "md")
    edges, told = [0, *np.flatnonzero(np.diff(found.bands)) + 1, rows], -np.inf
    for start, end in itertools.pairwise(edges):
        y, middle = (TOP + height * at / rows for at in (end, (start + end) / 2))
        if end < rows:
            lines.line((LEFT - 5, y, RIGHT - 1, y), "black" if name in UNITS else "white")
            lines.line((LEFT - 5, y, LEFT - 1, y), "black")
        if middle - told >= 12:  # else it would hide the one before
            _write(image, (LEFT - 8, middle), f"band {NAMES[found.bands[start]]}", "rm")
            told = middle
    binned = "" if found.rows == rows else f", in {rows} bins"
    _write(image, (11, (TOP + BOTTOM) / 2), f"{found.rows:,} rows by frequency{binned}", "mm", turn=90)
    _draw_bar(image, UNITS.get(name, f"|{name}|, nats / parameter"), scale)
    return image


def write_heatmaps(place: Path, runs: Mapping[str, Sequence[Run]], tied: Mapping[str, bool]) -> None:
    """Write pictures of the rows into `mean/<arm>` of a finished comparison."""
    found = {name: maps_of(of_arm, tied[name]) for name, of_arm in runs.items()}
    scales = {name: _scale(name, list(found.values())) for name in ("share", "cosine", *PARTS)}
    for arm, of_arm in found.items():
        images = []
        for name in (name for name in scales if name in of_arm.values):
            seeds = f"{len(runs[arm])} seed" + "s" * (len(runs[arm]) > 1)
            buffer = io.BytesIO()
            draw(of_arm, name, f"{arm}: {name} of each row, mean of {seeds}", scales[name]).save(buffer, "png")
            image = Summary.Image(width=WIDTH, height=HEIGHT, colorspace=3, encoded_image_string=buffer.getvalue())
            about = (
                f"{UNITS.get(name, f'L2 norm of the {name}, nats / parameter')}, of each row over the probe, by step"
            )
            images.append(described(f"rows_map/{name}", "images", about, image=image))
        write_events(place / MEAN / arm, "images", [(of_arm.steps[-1], Summary(value=images))])
