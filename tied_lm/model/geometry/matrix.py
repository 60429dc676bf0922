"""How the rows of one matrix lie in space: its spectrum, and how far they all point one way."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int

from tied_lm.bands import NAMES, bands_of
from tied_lm.model.geometry.arrays import AnyArray, Rows, norms, principal_axes, row_vector, rows_of, unit_rows


class MatrixGeometry(NamedTuple):
    """What `measure_matrix` says of a matrix; everything is exact over all rows, none is sampled."""

    singular_values: Float64[np.ndarray, "R"]  # largest first, R = min(V, D)
    effective_rank: float
    participation_ratio: float
    mean_row: float  # norm of the mean row over the mean norm of the rows; 0 to 1
    mean_cosine: float
    isotropy: float
    mean_cosine_by_band: dict[str, float]  # by the name of the band; {} without frequencies
    norm_slope: float  # NaN without frequencies


def effective_rank(singular_values: Float[AnyArray, "R"]) -> float:
    """exp(-sum_i p_i log p_i) with p_i = s_i / sum s (Roy and Vetterli, EUSIPCO 2007); NaN if all are 0."""
    s = np.asarray(singular_values, np.float64)
    p = s[s > 0] / s.sum() if s.any() else np.array([np.nan])
    return float(np.exp(-np.sum(p * np.log(p))))


def participation_ratio(singular_values: Float[AnyArray, "R"]) -> float:
    """(sum_i s_i^2)^2 / sum_i s_i^4: the participation ratio (Gao et al. 2017, "A theory of multineuronal
    dimensionality") of the second moments, which are not centred; NaN if all are 0."""
    s = np.asarray(singular_values, np.float64)
    power = (s / s.max()) ** 2 if s.any() else np.array([np.nan])
    return float(power.sum() ** 2 / np.sum(power**2))


def mean_cosine(table: Float[AnyArray, "V D"]) -> float:
    """Mean cosine of all pairs of two different rows that are not 0 (Ethayarajh 2019, arXiv:1909.00512).

    With u the rows over their norms, the sum over pairs is (|sum_v u_v|^2 - V) / 2: nothing is V x V, and no pair is
    left out. NaN with fewer than two rows.
    """
    return _mean_cosine(unit_rows(rows_of("table", table)))


def _mean_cosine(unit_VxD: Rows) -> float:
    unit_VxD = unit_VxD[~np.isnan(unit_VxD[:, 0])]
    rows = len(unit_VxD)
    total_D = unit_VxD.sum(axis=0)
    return float((total_D @ total_D - rows) / (rows * (rows - 1))) if rows > 1 else np.nan


def isotropy(table: Float[AnyArray, "V D"]) -> float:
    """min_c Z(c) / max_c Z(c), where Z(c) = sum_v exp(c . w_v) and c runs over the right singular vectors.

    The partition function of Mu and Viswanath (2018, arXiv:1702.01417): 1 where no direction stands out, near 0 in a
    narrow cone. A singular vector has no sign, so both c and -c are taken. It falls as the rows grow longer.
    """
    rows_VxD = rows_of("table", table)
    return _isotropy(rows_VxD, principal_axes(rows_VxD)[1])


def _isotropy(rows_VxD: Rows, axes_DxD: Float64[np.ndarray, "D D"]) -> float:
    along_VxD = rows_VxD.astype(np.float32) @ axes_DxD.astype(np.float32)
    largest = np.stack([along_VxD.max(axis=0), -along_VxD.min(axis=0)])
    sums = [
        np.exp(sign * along_VxD - top_D).sum(axis=0, dtype=np.float64)
        for sign, top_D in zip((1, -1), largest, strict=True)
    ]
    log_z = np.log(sums) + largest
    return float(np.exp(log_z.min() - log_z.max()))


def norm_slope(table: Float[AnyArray, "V D"], frequencies: Float[AnyArray, "V"]) -> float:
    """Least-squares slope of the norm of a row against the natural log of its frequency, in norm per nat.

    Rows of frequency 0 are left out. NaN if the others have one frequency.
    """
    rows_VxD = rows_of("table", table)
    return _norm_slope(rows_VxD, row_vector("frequencies", frequencies, len(rows_VxD)))


def _norm_slope(rows_VxD: Rows, frequency_V: np.ndarray) -> float:
    seen = frequency_V > 0
    if np.unique(frequency_V[seen]).size < 2:
        return np.nan
    log_f = np.log(frequency_V[seen])
    log_f -= log_f.mean()
    return float(log_f @ norms(rows_VxD[seen]) / (log_f @ log_f))


def measure_matrix(table: Float[AnyArray, "V D"], frequencies: Float[AnyArray, "V"] | None = None) -> MatrixGeometry:
    """The geometry of one matrix.

    Args:
        frequencies: of each row in the training data, up to a factor; they make the bands and the slope.

    Raises:
        ValueError: `table` is no finite (V, D) array of floats, or there is not one frequency for each row.

    >>> import numpy as np
    >>> cone = np.random.default_rng(0).standard_normal((1000, 8)) + 3 * np.eye(8)[0]
    >>> found = measure_matrix(cone)
    >>> found.mean_cosine > 0.4, found.effective_rank < 8
    (True, True)
    """
    rows_VxD = rows_of("table", table)
    singular_D, axes_DxD = principal_axes(rows_VxD)
    singular_values = singular_D[: min(rows_VxD.shape)]
    unit_VxD, norm_V = unit_rows(rows_VxD), norms(rows_VxD)
    cosine_by_band, slope = {}, np.nan
    if frequencies is not None:
        frequency_V = row_vector("frequencies", frequencies, len(rows_VxD))
        bands_V: Int[np.ndarray, "V"] = bands_of(frequency_V / max(frequency_V.sum(), 1e-300))
        cosine_by_band = {NAMES[band]: _mean_cosine(unit_VxD[bands_V == band]) for band in np.unique(bands_V)}
        slope = _norm_slope(rows_VxD, frequency_V)
    return MatrixGeometry(
        singular_values=singular_values,
        effective_rank=effective_rank(singular_values),
        participation_ratio=participation_ratio(singular_values),
        mean_row=float(np.linalg.norm(rows_VxD.mean(axis=0)) / norm_V.mean()) if norm_V.any() else np.nan,
        mean_cosine=_mean_cosine(unit_VxD),
        isotropy=_isotropy(rows_VxD, axes_DxD),
        mean_cosine_by_band=cosine_by_band,
        norm_slope=slope,
    )
