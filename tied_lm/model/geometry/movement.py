"""How the rows of a matrix move during training, each by itself and all in one direction."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int

from tied_lm.bands import NAMES
from tied_lm.model.geometry.arrays import AnyArray, by_band, norms, row_cosines, row_vector, rows_of, same_shape


class Drift(NamedTuple):
    """How far each row has come, and whether straight; in the units of the matrix."""

    cosine_to_start: Float64[np.ndarray, "V"]  # of the last matrix with the first one
    displacement: Float64[np.ndarray, "V"]  # distance between these two
    cosine_to_previous: Float64[np.ndarray, "V"]  # of the last matrix with the one before
    distance_to_previous: Float64[np.ndarray, "V"]
    path: Float64[np.ndarray, "V"]  # sum of the distances from each matrix to the next
    straightness: Float64[np.ndarray, "V"]  # displacement / path: 1 along a ray; NaN where nothing moved
    measurements: int  # the more there are, the longer the path: compare at equal steps only


class CommonDrift(NamedTuple):
    """Whether the rows of a band move together."""

    cosine: Float64[np.ndarray, "V"]  # of each row's update with the mean update of the other rows of its band
    cosine_by_band: dict[str, float]  # its mean


def measure_drift(matrices: Iterable[Float[AnyArray, "V D"]]) -> Drift:
    """Drift of the rows over the same matrix at several steps, the first one first.

    The path is a lower bound of the way really gone, since between two measurements a row is taken to go straight. Two
    matrices are held beside the first one, so a generator may read them one by one.

    Raises:
        ValueError: there are fewer than two, or they are not finite (V, D) arrays of floats of one shape.
    """
    found = deque(drifts(matrices), maxlen=1)
    if not found:
        raise ValueError("matrices has 1 or none: a drift is measured between two or more")
    return found[0]


def drifts(matrices: Iterable[Float[AnyArray, "V D"]]) -> Iterator[Drift]:
    """The drift up to each matrix but the first one; see `measure_drift`."""
    start_VxD = now_VxD = None
    path_V = np.zeros(())
    for number, matrix in enumerate(matrices):
        if start_VxD is None or now_VxD is None:
            start_VxD = now_VxD = rows_of("matrices[0]", matrix)
            continue
        before_VxD = now_VxD
        now_VxD, _ = same_shape(**{f"matrices[{number}]": matrix, "matrices[0]": start_VxD})
        distance_V, displacement_V = norms(now_VxD - before_VxD), norms(now_VxD - start_VxD)
        path_V = path_V + distance_V
        yield Drift(
            cosine_to_start=row_cosines(now_VxD, start_VxD),
            displacement=displacement_V,
            cosine_to_previous=row_cosines(now_VxD, before_VxD),
            distance_to_previous=distance_V,
            path=path_V,
            straightness=np.divide(displacement_V, path_V, out=np.full_like(path_V, np.nan), where=path_V > 0),
            measurements=number + 1,
        )


def common_drift(update: Float[AnyArray, "V D"], bands: Int[AnyArray, "V"]) -> CommonDrift:
    """Cosine of each row's update with the mean update of the other rows of its band.

    Rare rows that are only ever pushed move together (Gao et al. 2019, arXiv:1907.12009; Bis et al. 2021, "Too much in
    common"). A row is left out of the mean that it is compared with: in it, n independent updates would have a cosine
    of 1 / sqrt(n) with their mean. NaN for a band of one row, and for rows that did not move.

    Args:
        update: a change of the matrix, over one step or many; or a gradient.
        bands: the band of each row, of `tied_lm.bands.bands_of`.

    Raises:
        ValueError: `update` is no finite (V, D) array of floats, or there is not one band for each row.
    """
    update_VxD = rows_of("update", update)
    bands_V = row_vector("bands", bands, len(update_VxD)).astype(np.int64)
    sums = np.zeros((len(NAMES), update_VxD.shape[1]))
    np.add.at(sums, bands_V, update_VxD)
    alone_V = np.bincount(bands_V)[bands_V] == 1
    cosine_V = np.where(alone_V, np.nan, row_cosines(update_VxD, sums[bands_V] - update_VxD))
    return CommonDrift(cosine_V, by_band(cosine_V, bands_V))
