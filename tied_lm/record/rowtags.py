"""What is told of row statistics by tag: norms by band, histograms, the curves of single tokens."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from tied_lm import bands as bands_
from tied_lm.record.cards import HYPOTHETICAL
from tied_lm.rows import FIELDS, NORM, Stats, shown_by_group, shown_by_row, tag
from tied_lm.tokenstring import markdown

TOKENS = "tokens"  # the tag of the table of the tokens that are followed


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of the rows. Where their frequencies are not known, nothing is told by band."""

    strings: Sequence[str]  # as `tokenstring.visible` shows them
    frequencies: Float[np.ndarray, "V"] | None
    bands: Int[np.ndarray, "V"] | None
    named: Sequence[int]  # ids to follow as curves, beside a frequent, a middle and a rare one

    @property
    def constants(self) -> dict[str, Any]:
        """What a log keeps of each row."""
        known = {} if self.bands is None else {"frequency": self.frequencies, "band": self.bands}
        return {"token": np.arange(len(self.strings))} | known

    @functools.cached_property
    def present(self) -> dict[str, Int[np.ndarray, "R"]]:
        """Rows of each band that has any, by its name."""
        of_band = {} if self.bands is None else {int(b): np.flatnonzero(self.bands == b) for b in np.unique(self.bands)}
        return {bands_.NAMES[band]: rows for band, rows in of_band.items()}

    @functools.cached_property
    def followed(self) -> dict[str, int]:
        """Ids to follow, by the name of the curve."""
        named = {f"named_{token}": token for token in self.named}
        if self.frequencies is None:
            return named
        order = np.argsort(-self.frequencies, kind="stable")
        seen = order[: np.count_nonzero(self.frequencies)]
        chosen = {"frequent": seen[0], "middle": seen[len(seen) // 2], "rare": seen[-1]}
        return {f"{name}_{token}": int(token) for name, token in chosen.items()} | named

    @property
    def followed_strings(self) -> dict[str, str]:
        """How the tokens that are followed are shown, by the name of the curve."""
        return {name: self.strings[token] for name, token in self.followed.items()}

    def token_table(self) -> str:
        """The tokens that are followed, in Markdown."""
        rows = [f"| {name} | {token} | {markdown(self.strings[token])} |" for name, token in self.followed.items()]
        return "| curve | id | token |\n|---|---|---|\n" + "\n".join(rows)

    def charts(self, fields: Sequence[str], prefix: str, tied: bool) -> dict[str, list[str]]:
        """Tags of each statistic by band, all bands in one chart."""
        keys = sorted(shown_by_group(fields), key=lambda key: FIELDS[key].hypothetical)
        shown = [key for key in keys if tied or not FIELDS[key].hypothetical]
        return {key: [f"{prefix}band/{band}/{key}" for band in self.present] for key in shown}


def attributes_of(field: str, untied_from: int | None) -> dict[str, Any]:
    """What an array of one field of the statistics says of itself; `untied_from` is a step, None if always tied."""
    known = FIELDS.get(field)  # a part of the push that a scheme tells apart is none
    attributes: dict[str, Any] = {"units": known.kind.units if known else NORM.units}
    if untied_from is not None and known and known.hypothetical:
        since = f"from step {untied_from} on, " if untied_from else ""
        attributes["hypothetical"] = since + "lookup and scoring are gradients of two matrices of arbitrary scales"
    return attributes


def part_scalars(norms: Mapping[str, Float[Array, "V"]], rows: Rows) -> dict[str, float]:
    """Scalars of parts of the push that a scheme tells apart: norms over the whole table and over each band."""
    scalars: dict[str, float] = {}
    for name, norms_V in norms.items():
        squares_V = np.asarray(norms_V, np.float64) ** 2
        scalars[f"grad_norm/{name}"] = float(np.sqrt(squares_V.sum()))
        for band, of_band in rows.present.items():
            scalars[f"band/{band}/{name}"] = float(np.sqrt(squares_V[of_band].sum()))
    return scalars


def row_scalars(stats: Stats, rows: Rows, tied: bool) -> dict[str, float]:
    """Scalars for the whole table and each band."""
    scalars = bands_.split_scalars(stats, rows.bands, tied)
    for part in shown_by_row(stats._fields):
        scalars[tag(f"rows_zero/{part}", part, tied)] = float(np.mean(np.asarray(getattr(stats, part)) == 0))
    return scalars


def token_norms(stats: Stats, rows: Rows, tied: bool) -> dict[str, float]:
    """Row norms of the tokens that are followed."""
    return {
        tag(f"token/{name}/{part}", part, tied): float(getattr(stats, part)[token])
        for name, token in rows.followed.items()
        for part in shown_by_row(stats._fields)
    }


def token_scalars(stats: Stats, rows: Rows, tied: bool) -> dict[str, float]:
    """Row norms of the tokens that are followed, and the lookup's share and cosine in each; NaN where undefined."""
    scalars: dict[str, float] = {}
    for name, token in rows.followed.items():
        values: list[Any] = [np.asarray(field)[[token]] for field in stats]
        of_row = bands_.describe(type(stats)(*values))
        scalars |= {tag(f"token/{name}/{field}", field, tied): value for field, value in of_row.items()}
    return scalars


def of_probe(scalars: Mapping[str, float]) -> dict[str, float]:
    """Scalars by the tags that they have as those of the probe; what is hypothetical says so first."""
    plain = {tag: tag.removeprefix(HYPOTHETICAL) for tag in scalars}
    return {f"{tag[: -len(plain[tag])]}probe/{plain[tag]}": value for tag, value in scalars.items()}


def tagged(histograms: Mapping[str, Int[np.ndarray, "bins"]], tied: bool) -> dict[str, Int[np.ndarray, "bins"]]:
    """Histograms of row norms, by tag instead of by part."""
    return {tag(f"rows/{part}", part, tied): np.asarray(counts) for part, counts in histograms.items()}
