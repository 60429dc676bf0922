"""How far an update moves rows, and how many."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tied_lm.bands import NAMES
from tied_lm.intervals import RATIO, SHARE
from tied_lm.record.reader import Run
from tied_lm.study.palette import MATRICES, OTHER_MATRIX, Style
from tied_lm.study.picture import Key, Picture, Section, by_band, curve, estimates, joined, log_steps, panel, plain_log
from tied_lm.study.subject import Subject

SCALES = (RATIO, SHARE)


def moves(updates_V: Float[np.ndarray, "V"], weights_V: Float[np.ndarray, "V"]) -> tuple[float, float]:
    """How far an update moved rows, and how many: the median of |update| / |row| over those that moved and were not 0,
    and the share of the rows that moved. NaN without such rows, and where there was no update."""
    moved_V = updates_V > 0
    of = moved_V & (weights_V > 0)
    size = float(np.median(updates_V[of] / weights_V[of])) if of.any() else math.nan
    return size, math.nan if np.isnan(updates_V).all() else float(moved_V.mean())


class Moves(NamedTuple):
    """What `moves` says of a run, by parameter."""

    steps: Int[np.ndarray, "T"]
    whole: dict[str, Float[np.ndarray, "T 2"]]  # of all rows, at each recorded step
    by_band: dict[str, Float[np.ndarray, "G 2"]]  # at the last update that was recorded

    @classmethod
    def of(cls, run: Run, bands: Sequence[str]) -> "Moves":
        data, whole, by_band = run.rows, {}, {}
        rows = [data["band"].values == NAMES.index(band) for band in bands]
        for field in sorted(name for name in map(str, data) if name.startswith("update")):
            update, weight = data[field].values, data[field.replace("update", "weight")].values
            name = field.removeprefix("update_").replace("update", "embedding")
            whole[name] = np.array(list(map(moves, update, weight)))
            # The last step of a run has no update.
            last = next((k for k in reversed(range(len(update))) if not np.isnan(update[k]).all()), 0)
            by_band[name] = np.array([moves(update[last, of], weight[last, of]) for of in rows])
        return cls(data["step"].values, whole, by_band)


def _found(subject: Subject) -> dict[str, list[Moves]]:
    found: dict[str, list[Moves]] = {}
    for name, arm in subject.arms.items():
        for run in arm.runs:
            try:
                found.setdefault(name, []).append(Moves.of(run, subject.bands))
            except FileNotFoundError:
                continue
    return found


def _style(subject: Subject, arm: str, parameter: str) -> Style:
    return subject.arms[arm].style._replace(line=MATRICES.get(parameter, OTHER_MATRIX))


def _two(xlabel: str = "") -> list[tuple[Figure, Axes]]:
    """Panels of the sizes and of how many moved."""
    pair = [
        panel(xlabel=xlabel, ylabel=label)
        for label in ("|update| / |row|, rows that moved", "share of rows that moved")
    ]
    pair[0][1].set_yscale("log")
    pair[1][1].set_ylim(-0.03, 1.03)
    return pair


def _lines(found: Mapping[str, list[Moves]]) -> list[tuple[str, str]]:
    return [(name, parameter) for name, of_arm in found.items() for parameter in of_arm[0].whole]


def row_moves(subject: Subject) -> Section | None:
    """Over training, and in each band at the last update that was recorded."""
    found = _found(subject) if subject.bands else {}
    if not found:
        return None
    lines, last = _lines(found), max(int(one.steps[-1]) for of_arm in found.values() for one in of_arm)
    over_time, in_bands = _two("updates"), _two()
    for k, scale in enumerate(SCALES):
        for name, parameter in lines:
            x, values = joined([(one.steps.tolist(), one.whole[parameter][:, k]) for one in found[name]])
            curve(over_time[k][1], x, estimates(values, scale), _style(subject, name, parameter), name)
        of_bands = [
            (
                name,
                _style(subject, name, parameter),
                estimates(np.array([one.by_band[parameter][:, k] for one in found[name]]), scale),
            )
            for name, parameter in lines
        ]
        by_band(in_bands[k][1], subject.bands, of_bands)
        log_steps(over_time[k][1], last)
    for pair in (over_time, in_bands):
        plain_log(pair[0][1].yaxis)
    words = ("Size of an update relative to its row, median over the rows that moved", "Share of the rows that moved")
    of = ", ".join(f"{name} {parameter}" for name, parameter in lines)
    pictures = [
        Picture(figure, f"{what}, {where}: {of}.")
        for where, pair in {"over training": over_time, "by band at the last update recorded": in_bands}.items()
        for what, (figure, _) in zip(words, pair, strict=True)
    ]
    note = (
        "The size of the applied update relative to the row's own norm, median over the rows that moved: this can be "
        "compared between tied and untied models. Beside it the share of the rows that moved at all. First over "
        "training, then by band at the last update that was recorded, where a falling rate makes all of them small."
    )
    keys = [Key(f"{name}: {parameter}", _style(subject, name, parameter)) for name, parameter in lines]
    return Section("How far an update moves a row", note, pictures, keys)
