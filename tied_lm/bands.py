"""Groups of rows of similar frequency, and what the statistics of the rows say of each."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from tied_lm.rows import NORMS, RowStats, UseStats

CUTS = (0.2, 0.4, 0.6, 0.8)
UNSEEN = len(CUTS) + 1
NAMES = (*(str(b) for b in range(UNSEEN)), "unseen")


def bands_of(frequencies: Float[np.ndarray, "V"]) -> Int[np.ndarray, "V"]:
    """Band of each row: the number of cuts at or below the cumulative frequency of all more frequent rows.

    So band 0 holds the few most frequent rows, which make up the first fifth of all tokens. Rows of frequency 0 are
    in a band of their own, `UNSEEN`.
    """
    order = np.argsort(-frequencies, kind="stable")
    before = np.cumsum(frequencies[order]) - frequencies[order]
    bands = np.empty(frequencies.size, np.int32)
    # The margin keeps rounding in the sum from moving a row that lies on a cut.
    bands[order] = np.searchsorted(np.array(CUTS) - 1e-9, before, side="right")
    bands[frequencies == 0] = UNSEEN
    return bands


def describe(stats: RowStats | UseStats) -> dict[str, float]:
    """Norms of the parts over the rows given, and the lookup's share and cosine.

    share = |lookup|^2 / (|lookup|^2 + |scoring|^2) and cosine = <lookup, scoring> / (|lookup| |scoring|), with the
    norms and the product over all the rows; each is NaN where it is 0 / 0.
    """
    rows = {part: np.asarray(getattr(stats, part), np.float64) for part in NORMS if hasattr(stats, part)}
    norms = {part: float(np.sqrt(np.sum(norm_V**2))) for part, norm_V in rows.items()}
    lookup, scoring = norms["lookup"], norms["scoring"]
    products = rows["lookup"] * rows["scoring"]
    dot = float(np.sum(products * np.asarray(stats.cosine, np.float64), where=products > 0))
    share = lookup**2 / (lookup**2 + scoring**2) if lookup or scoring else math.nan
    return norms | {"share": share, "cosine": dot / (lookup * scoring) if lookup and scoring else math.nan}


def split_scalars(stats: RowStats | UseStats, bands: Int[np.ndarray, "V"] | None, tied: bool) -> dict[str, float]:
    """Scalars by tag, for the whole table and for each band, if there are bands; NaN where one is undefined.

    In an untied model lookup and scoring are gradients of two matrices whose scales are arbitrary, so their sum,
    share and cosine are hypothetical: the tags say so, and do not overlay those of a tied run.
    """
    scalars: dict[str, float] = {}

    def add(group: str, names: Mapping[str, str], values: Mapping[str, float]) -> None:
        for name, key in names.items():
            hypothetical = not tied and key in ("total", "share", "cosine")
            scalars[("hypothetical/" if hypothetical else "") + f"{group}/{name}"] = values[key]

    whole = describe(stats)
    add("grad_norm", {part: part for part in NORMS if part in whole}, whole)
    add("split", {"share": "share", "cosine": "cosine"}, whole)
    for band in () if bands is None else np.unique(bands):
        rows = bands == band
        values = describe(type(stats)(*(np.asarray(field)[rows] for field in stats)))
        add(f"band/{NAMES[band]}", {key: key for key in values}, values)
    return scalars
