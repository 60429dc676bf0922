"""What TensorBoard and the metrics tell of row statistics: norms by band, histograms, the curves of single tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from tied_lm import bands as bands_
from tied_lm.record.tensorboard import Board
from tied_lm.rows import FIELDS, NORM, RowStats, UseStats, shown_by_group, shown_by_row, tag
from tied_lm.tokenstring import markdown


def tracked_tokens(frequencies: Float[np.ndarray, "V"] | None, named: Sequence[int]) -> dict[str, int]:
    """Ids to follow by curve name: a frequent, a middle and a rare one, and those that the user names."""
    if frequencies is None:
        return {f"named_{token}": token for token in named}
    order = np.argsort(-frequencies, kind="stable")
    seen = order[: np.count_nonzero(frequencies)]
    chosen = {"frequent": seen[0], "middle": seen[len(seen) // 2], "rare": seen[-1]}
    return {f"{name}_{token}": int(token) for name, token in chosen.items()} | {f"named_{t}": t for t in named}


def attributes_of(field: str, untied_from: int | None) -> dict[str, Any]:
    """What an array of one field of the statistics says of itself; `untied_from` is a step, None if always tied."""
    known = FIELDS.get(field)  # a part of the push that a scheme tells apart is none
    attributes: dict[str, Any] = {"units": known.kind.units if known else NORM.units}
    if untied_from is not None and known and known.hypothetical:
        since = f"from step {untied_from} on, " if untied_from else ""
        attributes["hypothetical"] = since + "lookup and scoring are gradients of two matrices of arbitrary scales"
    return attributes


class RowBoard:
    """What is shown of row statistics.

    In an untied model `total`, `share` and `cosine` are hypothetical, and their tags say so.

    Args:
        bands: of the rows; None if their frequencies are not known, and then nothing is told by band.
        tracked: ids of the tokens to follow, by the name of the curve.
    """

    def __init__(self, tied: bool, bands: Int[np.ndarray, "V"] | None, tracked: Mapping[str, int]):
        self.tied, self.bands, self.tracked = tied, bands, tracked

    def show_tokens(self, board: Board, token_strings: Sequence[str]) -> None:
        """The tokens that the curves are of; their strings are those of `tokenstring.visible`."""
        rows = [f"| {name} | {token} | {markdown(token_strings[token])} |" for name, token in self.tracked.items()]
        board.text("tokens", "| curve | id | token |\n|---|---|---|\n" + "\n".join(rows))

    def charts(self, fields: Sequence[str], category: str, prefix: str = "") -> dict[str, dict[str, list[object]]]:
        """A category of custom charts: each part by band, all bands in one chart."""
        present = () if self.bands is None else [bands_.NAMES[band] for band in np.unique(self.bands)]
        keys = sorted(shown_by_group(fields), key=lambda key: FIELDS[key].hypothetical)
        keys = [key for key in keys if self.tied or not FIELDS[key].hypothetical]
        return {category: {key: ["Multiline", [f"{prefix}band/{band}/{key}" for band in present]] for key in keys}}

    def scalars(self, stats: RowStats | UseStats) -> dict[str, float]:
        """Scalars by tag, for the whole table and for each band."""
        return bands_.split_scalars(stats, self.bands, self.tied)

    def part_scalars(self, norms: Mapping[str, Float[Array, "V"]]) -> dict[str, float]:
        """Scalars of parts of the push that a scheme tells apart: norms over the whole table and over each band."""
        scalars: dict[str, float] = {}
        for name, norms_V in norms.items():
            squares_V = np.asarray(norms_V, np.float64) ** 2
            scalars[f"grad_norm/{name}"] = float(np.sqrt(squares_V.sum()))
            for band in () if self.bands is None else np.unique(self.bands):
                scalars[f"band/{bands_.NAMES[band]}/{name}"] = float(np.sqrt(squares_V[self.bands == band].sum()))
        return scalars

    def row_scalars(self, stats: RowStats | UseStats) -> dict[str, float]:
        """Scalars by tag, for the whole table, each band, and single tokens."""
        scalars = self.scalars(stats)
        for part in shown_by_row(stats._fields):
            norms_V = np.asarray(getattr(stats, part))
            scalars[tag(f"rows_zero/{part}", part, self.tied)] = float(np.mean(norms_V == 0))
            for name, token in self.tracked.items():
                scalars[tag(f"token/{name}/{part}", part, self.tied)] = float(norms_V[token])
        return scalars

    def show_histograms(self, board: Board, step: int, histograms: Mapping[str, Int[np.ndarray, "bins"]]) -> None:
        """The histograms of the norms, by part."""
        for part, counts in histograms.items():
            board.row_histogram(step, tag(f"rows/{part}", part, self.tied), np.asarray(counts))
