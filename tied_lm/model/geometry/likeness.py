"""How alike two matrices are whose rows stand for the same tokens, whatever their axes."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Int

from tied_lm.model.geometry.arrays import AnyArray, Rows, principal_axes, row_cosines, rows_of, unit_rows, whitening

Unit = Float32[np.ndarray, "V D"]
PAIRS = 50_000
JUDGED = 4096
QUERIES = 300
NEIGHBOURS = 10
BLOCK = 4096  # rows that are put in another order at a time


class Likeness(NamedTuple):
    """Measures of likeness; each at most 1."""

    spearman: float  # of the cosines of pairs of rows in one matrix and in the other
    procrustes_r2: float
    procrustes_cosine: float
    linear_r2: float
    linear_cosine: float
    cka: float
    neighbours: float  # share of the nearest neighbours of a row that the two matrices agree on


class Comparison(NamedTuple):
    """Two matrices, and the same with the rows of the second in random order: what is no likeness."""

    likeness: Likeness
    permuted: Likeness  # its `neighbours` is the exact mean over all orders
    rows: int  # that are compared: those that are 0 in neither matrix
    pairs: int  # of rows that `spearman` is over; drawn at random unless they are all
    judged: int  # rows whose cosines with what was fitted to them are averaged; likewise
    queries: int  # rows whose neighbours among all rows are compared; likewise
    k: int  # neighbours of each


def compare_matrices(a: Float[AnyArray, "V D"], b: Float[AnyArray, "V E"], seed: int = 0) -> Comparison:
    """How alike two matrices are, beside the same with the rows of `b` permuted.

    spearman: rank correlation of the cosines of pairs (Press and Wolf 2017, arXiv:1608.05859).
    procrustes: of the centred matrices, the rotation and scale of `a` that come closest to `b` (Schoenemann 1966); r2
        is 1 less the disparity of `scipy.spatial.procrustes`, and symmetric.
    linear: least squares of `b` on `a`, with an intercept. It is fitted and judged on the same rows, so that r2 is
        about D / V for nothing: the permuted rows show it.
    Their cosine is the mean, over rows, of that of what was fitted and what it was fitted to, both centred.
    cka: linear centred kernel alignment (Kornblith et al. 2019, arXiv:1905.00414).
    neighbours: of the `k` rows of largest cosine with a row, the share that is the same in both matrices.

    Args:
        seed: of the pairs, the queries and the order of the rows.

    Raises:
        ValueError: one is no finite (V, D) array of floats, or they differ in rows; or fewer than three rows are 0 in
            neither.
    """
    a_VxD, b_VxE = _own("a", a), _own("b", b)
    if len(a_VxD) != len(b_VxE):
        raise ValueError(f"a has {len(a_VxD)} rows and b has {len(b_VxE)}: a row of each is one token")
    both_V = a_VxD.any(axis=1) & b_VxE.any(axis=1)
    if not both_V.all():
        a_VxD, b_VxE = a_VxD[both_V], b_VxE[both_V]
    rows, rng = len(a_VxD), np.random.default_rng(seed)
    if rows < 3:
        raise ValueError(f"a and b have {rows} rows that are 0 in neither: likeness takes 3 or more")
    unit_a_VxD, unit_b_VxE = (unit_rows(rows_VxD.astype(np.float32)) for rows_VxD in (a_VxD, b_VxE))
    order_V = rng.permutation(rows)
    left_P, right_P = _pairs(rows, rng, PAIRS)
    judged_J = rng.permutation(rows)[:JUDGED]
    queries_Q, k = judged_J[:QUERIES], min(NEIGHBOURS, rows - 1)
    cosines_P = _pair_cosines(unit_a_VxD, left_P, right_P)

    def spearman(left_P: np.ndarray, right_P: np.ndarray) -> float:
        return _spearman(cosines_P, _pair_cosines(unit_b_VxE, left_P, right_P))

    agreeing = _agreement(_nearest(unit_a_VxD, queries_Q, k), _nearest(unit_b_VxE, queries_Q, k))
    for rows_VxD in (a_VxD, b_VxE):
        rows_VxD -= rows_VxD.mean(axis=0)
    alignment, permuted = _alignments(a_VxD, b_VxE, order_V, judged_J)
    return Comparison(
        Likeness(spearman(left_P, right_P), neighbours=agreeing, **alignment),
        Likeness(spearman(order_V[left_P], order_V[right_P]), neighbours=k / (rows - 1), **permuted),
        rows,
        left_P.size,
        judged_J.size,
        queries_Q.size,
        k,
    )


def _own(name: str, table: Float[AnyArray, "V D"]) -> Rows:
    """The matrix in memory of its own, since means are taken out in place: new arrays cost more than the sums."""
    rows_VxD = rows_of(name, table)
    return rows_VxD.copy() if np.may_share_memory(rows_VxD, np.asarray(table)) else rows_VxD


def pair_spearman(a: Float[AnyArray, "V D"], b: Float[AnyArray, "V E"], pairs: int = PAIRS, seed: int = 0) -> float:
    """The `spearman` of `compare_matrices` by itself, over at most so many pairs; NaN with fewer than three rows."""
    a_VxD, b_VxE = rows_of("a", a).astype(np.float32), rows_of("b", b).astype(np.float32)
    both_V = a_VxD.any(axis=1) & b_VxE.any(axis=1)
    rows = int(np.count_nonzero(both_V))
    if rows < 3:
        return np.nan
    drawn = _pairs(rows, np.random.default_rng(seed), pairs)
    return _spearman(*(_pair_cosines(unit_rows(rows_VxD[both_V]), *drawn) for rows_VxD in (a_VxD, b_VxE)))


def _spearman(a_P: Float32[np.ndarray, "P"], b_P: Float32[np.ndarray, "P"]) -> float:
    """Pearson's correlation of ranks, in which equal values share their mean rank; NaN where all are equal."""
    ranks = []
    for values_P in (a_P, b_P):
        _, which_P, count = np.unique(values_P, return_inverse=True, return_counts=True)
        rank_P = (np.cumsum(count) - (count - 1) / 2)[which_P]
        ranks.append(rank_P - rank_P.mean())
    size = np.sqrt(np.sum(ranks[0] ** 2) * np.sum(ranks[1] ** 2))
    return float(np.sum(ranks[0] * ranks[1]) / size) if size else np.nan


def cka(a: Float[AnyArray, "V D"], b: Float[AnyArray, "V E"]) -> float:
    """The `cka` of `compare_matrices` by itself, over all rows; NaN where all rows of one are equal."""
    a_VxD, b_VxE = (rows_VxD - rows_VxD.mean(axis=0) for rows_VxD in (rows_of("a", a), rows_of("b", b)))
    kernels = np.linalg.norm(a_VxD.T @ a_VxD) * np.linalg.norm(b_VxE.T @ b_VxE)
    return float(np.sum((a_VxD.T @ b_VxE) ** 2) / kernels) if kernels else np.nan


def _pairs(rows: int, rng: np.random.Generator, most: int) -> tuple[Int[np.ndarray, "P"], Int[np.ndarray, "P"]]:
    """Pairs of two different rows: all, or where these are many a sample with replacement."""
    if rows * (rows - 1) // 2 <= most:
        left_P, right_P = np.triu_indices(rows, 1)
        return left_P, right_P
    left_P = rng.integers(rows, size=most)
    return left_P, (left_P + rng.integers(1, rows, size=most)) % rows


def _pair_cosines(
    unit_VxD: Unit, left_P: Int[np.ndarray, "P"], right_P: Int[np.ndarray, "P"]
) -> Float32[np.ndarray, "P"]:
    blocks = np.array_split(np.arange(left_P.size), 1 + left_P.size // 4096)
    return np.concatenate([np.einsum("pd,pd->p", unit_VxD[left_P[p]], unit_VxD[right_P[p]]) for p in blocks])


def _nearest(unit_VxD: Unit, queries_Q: Int[np.ndarray, "Q"], k: int) -> Int[np.ndarray, "Q k"]:
    """The k rows of largest cosine with each query, in no order, itself left out."""
    nearest = []
    for queries_C in np.array_split(queries_Q, 1 + queries_Q.size // 64):
        cosine_CxV = unit_VxD[queries_C] @ unit_VxD.T
        cosine_CxV[np.arange(queries_C.size), queries_C] = -np.inf
        nearest.append(np.argpartition(cosine_CxV, -k, axis=1)[:, -k:])
    return np.concatenate(nearest)


def _agreement(a_Qxk: Int[np.ndarray, "Q k"], b_Qxk: Int[np.ndarray, "Q k"]) -> float:
    return float((a_Qxk[:, :, None] == b_Qxk[:, None, :]).any(axis=2).mean())


def _alignments(
    a_VxD: Rows, b_VxE: Float64[np.ndarray, "V E"], order_V: Int[np.ndarray, "V"], judged_J: Int[np.ndarray, "J"]
) -> list[dict[str, float]]:
    """What two centred matrices have in common, up to a rotation, up to a linear map and in their kernels; then the
    same with the rows of b in the given order. Cosines are over the rows that are judged."""
    size_a, size_b = np.vdot(a_VxD, a_VxD), np.vdot(b_VxE, b_VxE)
    if size_a == 0 or size_b == 0:
        return [dict.fromkeys(("procrustes_r2", "procrustes_cosine", "linear_r2", "linear_cosine", "cka"), np.nan)] * 2
    singular_D, axes_DxD = principal_axes(a_VxD)
    whitening_DxR = whitening(singular_D, axes_DxD)
    kernels = np.linalg.norm(singular_D**2) * np.linalg.norm(b_VxE.T @ b_VxE)
    judged_a_JxD = a_VxD[judged_J]

    def align(order_V: Int[np.ndarray, "V"]) -> dict[str, float]:
        product_DxE = np.zeros((a_VxD.shape[1], b_VxE.shape[1]))
        for start in range(0, len(order_V), BLOCK):
            block = slice(start, start + BLOCK)
            product_DxE += a_VxD[block].T @ b_VxE[order_V[block]]
        judged_b_JxE = b_VxE[order_V[judged_J]]
        left_DxM, singular_M, right_MxE = np.linalg.svd(product_DxE, full_matrices=False)
        coefficients_RxE = whitening_DxR.T @ product_DxE
        # The wider one keeps its length, so that this is a rotation even where the widths differ.
        rotated_JxE = unit_rows(judged_a_JxD) @ (left_DxM @ right_MxE)
        mapped_JxE = judged_a_JxD @ (whitening_DxR @ coefficients_RxE)
        return {
            "procrustes_r2": float(singular_M.sum() ** 2 / (size_a * size_b)),
            "procrustes_cosine": float(np.nanmean(np.sum(rotated_JxE * unit_rows(judged_b_JxE), axis=1))),
            "linear_r2": float(np.sum(coefficients_RxE**2) / size_b),
            "linear_cosine": float(np.nanmean(row_cosines(mapped_JxE, judged_b_JxE))),
            "cka": float(np.sum(product_DxE**2) / kernels),
        }

    return [align(order) for order in (np.arange(len(order_V)), order_V)]
