"""Arrays as the geometry computes with them: float64, on the host."""

from typing import Literal

import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Float64, Int

from tied_lm.bands import NAMES
from tied_lm.model.arguments import check_table

AnyArray = Array | np.ndarray
Rows = Float64[np.ndarray, "V D"]


def rows_of(name: str, table: Float[AnyArray, "V D"]) -> Rows:
    """A matrix in float64.

    Raises:
        ValueError: it is not a (V, D) array of floats, or not finite; the argument is named.
    """
    check_table(name, table)
    rows_VxD = np.asarray(table, np.float64)
    if not np.isfinite(rows_VxD).all():
        raise ValueError(f"{name} has entries that are not finite")
    return rows_VxD


def same_shape(**tables: Float[AnyArray, "V D"]) -> list[Rows]:
    """Matrices of one shape, in float64; errors as in `rows_of`."""
    found = {name: rows_of(name, table) for name, table in tables.items()}
    shapes = {name: rows.shape for name, rows in found.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{' and '.join(f'{name} {shape}' for name, shape in shapes.items())} differ in shape")
    return list(found.values())


def row_vector(name: str, values: Float[AnyArray, "V"] | Int[AnyArray, "V"], rows: int) -> np.ndarray:
    """One value for each row, such as its frequency or its band.

    Raises:
        ValueError: there is not one finite value of at least 0 for each row.
    """
    array = np.asarray(values)
    if array.shape != (rows,) or not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"{name} has shape {array.shape}: it takes one finite value >= 0 for each of {rows} rows")
    return array


def norms(rows_VxD: np.ndarray) -> np.ndarray:
    """L2 norm of each row, without an array of squares."""
    return np.sqrt(np.einsum("vd,vd->v", rows_VxD, rows_VxD))


def unit_rows(rows_VxD: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "V D"]:
    """Each row divided by its norm; NaN where that is 0."""
    norm_V = norms(rows_VxD)
    return rows_VxD / np.where(norm_V > 0, norm_V, np.nan)[:, None]


def row_cosines(a_VxD: Rows, b_VxD: Rows) -> Float64[np.ndarray, "V"]:
    """Cosine of each pair of rows; NaN where either is 0."""
    return np.clip(np.einsum("vd,vd->v", unit_rows(a_VxD), unit_rows(b_VxD)), -1, 1)


def principal_axes(rows_VxD: Rows) -> tuple[Float64[np.ndarray, "D"], Float64[np.ndarray, "D D"]]:
    """Singular values, largest first, and the right singular vectors as columns.

    They come from the eigenvectors of the D x D matrix of inner products: a tenth of the time of a decomposition of
    tall matrices. Singular values below 1e-8 of the largest are rounding, and mean 0.
    """
    return axes_of_gram(rows_VxD.T @ rows_VxD)


def axes_of_gram(gram_DxD: Float64[np.ndarray, "D D"]) -> tuple[Float64[np.ndarray, "D"], Float64[np.ndarray, "D D"]]:
    """The same from the inner products of the columns."""
    # Of a small matrix by the driver that calls no threads: waiting for them takes longer than all else.
    driver: Literal["ev", "evd"] = "ev" if len(gram_DxD) <= 128 else "evd"
    values_D, axes_DxD = scipy.linalg.eigh(gram_DxD, driver=driver, check_finite=False, overwrite_a=True)
    return np.sqrt(np.maximum(values_D[::-1], 0)), axes_DxD[:, ::-1]


def whitening(
    singular_D: Float64[np.ndarray, "D"], axes_DxD: Float64[np.ndarray, "D D"], rounding: float = 1e-7
) -> Float64[np.ndarray, "D R"]:
    """K such that the columns of `rows @ K` are an orthonormal basis of the column space of `rows`, of dimension R.

    Args:
        singular_D, axes_DxD: what `principal_axes` says of `rows`.
        rounding: a singular value that is so small a part of the largest is taken for 0.
    """
    kept = singular_D > rounding * singular_D[0]
    return axes_DxD[:, kept] / singular_D[kept]


def by_band(values_V: Float64[np.ndarray, "V"], bands_V: Int[np.ndarray, "V"]) -> dict[str, float]:
    """Mean of the values that there are in each band, by its name; NaN where there are none."""
    found = {NAMES[band]: values_V[(bands_V == band) & ~np.isnan(values_V)] for band in np.unique(bands_V)}
    return {name: float(values.mean()) if values.size else np.nan for name, values in found.items()}
