"""Groups of rows of similar frequency, and what the statistics of the rows say of each."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tied_lm.rows import FIELDS, Stats, shown_by_group, tag

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


def describe(stats: Stats) -> dict[str, float]:
    """Norms of the parts over the rows given, and the lookup's share and cosine.

    share = |lookup|^2 / (|lookup|^2 + |scoring|^2) and cosine = <lookup, scoring> / (|lookup| |scoring|), with the
    norms and the product over all the rows; each is NaN where it is 0 / 0.
    """
    values = {name: np.asarray(field, np.float64) for name, field in stats._asdict().items()}
    found = {name: FIELDS[name].kind.of_rows for name in shown_by_group(stats._fields)}
    return {name: of_rows(values, name) for name, of_rows in found.items() if of_rows}


def split_scalars(stats: Stats, bands: Int[np.ndarray, "V"] | None, tied: bool) -> dict[str, float]:
    """Scalars by tag, for the whole table and for each band, if there are bands; NaN where one is undefined.

    In an untied model lookup and scoring are gradients of two matrices whose scales are arbitrary, so their sum,
    share and cosine are hypothetical: the tags say so, and do not overlay those of a tied run.
    """
    scalars = {tag(f"{FIELDS[name].kind.group}/{name}", name, tied): value for name, value in describe(stats).items()}
    for band in () if bands is None else np.unique(bands):
        rows = np.flatnonzero(bands == band)
        values: list[Any] = [np.asarray(field)[rows] for field in stats]
        of_band = describe(type(stats)(*values))
        scalars |= {tag(f"band/{NAMES[band]}/{name}", name, tied): value for name, value in of_band.items()}
    return scalars
