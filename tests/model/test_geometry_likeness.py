"""How alike two matrices are, against NumPy and SciPy, on planted structure and as invariances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import procrustes
from scipy.stats import ortho_group, spearmanr

from tied_lm import geometry
from tied_lm.model.geometry import likeness


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def cosines(rows):
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit @ unit.T


def row_cosine(a, b):
    return np.mean((a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def measured_otherwise(a, b):
    """Everything from definitions with V x V matrices."""
    rows = len(a)
    upper = np.triu_indices(rows, 1)
    a0, b0 = a - a.mean(axis=0), b - b.mean(axis=0)
    fit = a0 @ np.linalg.lstsq(a0, b0)[0]
    wide = max(a.shape[1], b.shape[1])
    p, q, disparity = procrustes(*(np.pad(m, ((0, 0), (0, wide - m.shape[1]))) for m in (a, b)))
    centre = np.eye(rows) - 1 / rows
    kernels = [(centre @ m @ m.T @ centre).ravel() for m in (a, b)]
    near_a, near_b = (np.argsort(-cosines(m) + 3 * np.eye(rows), axis=1)[:, :10] for m in (a, b))
    agreeing = sum(np.intersect1d(*near).size for near in zip(near_a, near_b, strict=True))
    return geometry.Likeness(
        spearman=spearmanr(cosines(a)[upper], cosines(b)[upper]).statistic,
        procrustes_r2=1 - disparity,
        procrustes_cosine=row_cosine(p, q),
        linear_r2=1 - np.sum((b0 - fit) ** 2) / np.sum(b0**2),
        linear_cosine=row_cosine(fit, b0),
        cka=kernels[0] @ kernels[1] / np.linalg.norm(kernels[0]) / np.linalg.norm(kernels[1]),
        neighbours=agreeing / rows / 10,
    )


@pytest.mark.parametrize("widths", [(8, 8), (5, 9), (9, 5)])
def test_as_measured_from_the_definitions(widths):
    a = normal(60, widths[0]) + 0.5
    b = a @ normal(*widths, seed=1) + normal(60, widths[1], seed=2)
    found = geometry.compare_matrices(a, b)
    np.testing.assert_allclose(found.likeness, measured_otherwise(a, b), atol=1e-5)
    order = np.random.default_rng(0).permutation(60)  # as `compare_matrices` draws it first of all
    expected = measured_otherwise(a, b[order])._replace(neighbours=10 / 59)
    np.testing.assert_allclose(found.permuted, expected, atol=1e-5)
    assert (found.rows, found.pairs, found.judged, found.queries, found.k) == (60, 60 * 59 // 2, 60, 60, 10)


def test_neighbours_of_permuted_rows_agree_by_chance():
    a, rng = normal(40, 6), np.random.default_rng(3)
    by_order = [geometry.compare_matrices(a, a[rng.permutation(40)]).likeness.neighbours for _ in range(100)]
    assert np.mean(by_order) == pytest.approx(geometry.compare_matrices(a, a).permuted.neighbours, abs=0.02)


def test_samples_agree_with_the_whole(monkeypatch):
    a = normal(800, 8)
    b = a + 0.5 * normal(800, 8, seed=1)
    expected = measured_otherwise(a, b)
    monkeypatch.setattr(likeness, "JUDGED", 600)
    found = geometry.compare_matrices(a, b)
    assert (found.pairs, found.judged, found.queries) == (50_000, 600, 300)
    np.testing.assert_allclose(found.likeness, expected, atol=0.03)
    for name in ("procrustes_r2", "linear_r2", "cka"):
        assert getattr(found.likeness, name) == pytest.approx(getattr(expected, name), abs=1e-9)


def test_a_rotated_and_scaled_matrix_is_the_same():
    a = normal(400, 12)
    found = geometry.compare_matrices(a, 3 * a @ ortho_group.rvs(12, random_state=0))
    np.testing.assert_allclose(found.likeness, 1, atol=1e-5)
    assert max(found.permuted) < 0.25
    assert found.permuted.linear_r2 == pytest.approx(12 / 400, abs=0.02)  # what a fit alone gives


def test_a_linear_map_is_no_rotation():
    a = normal(500, 10)
    found = geometry.compare_matrices(a, a @ np.diag(np.logspace(-2, 2, 10))).likeness
    np.testing.assert_allclose([found.linear_r2, found.linear_cosine], 1)
    assert found.procrustes_r2 < 0.9
    assert found.neighbours < 0.5


def test_unlike_matrices_are_no_more_alike_than_permuted_ones():
    found = geometry.compare_matrices(normal(1000, 16), normal(1000, 16, seed=1))
    np.testing.assert_allclose(found.likeness, found.permuted, atol=0.02)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(15, 60), st.integers(2, 8), st.floats(0.01, 100))
def test_rotation_and_scale_of_either_change_nothing(seed, rows, width, scale):
    a = normal(rows, width, seed=seed)
    b = a + normal(rows, width, seed=seed + 1)
    turned = scale * a @ ortho_group.rvs(width, random_state=seed), b @ ortho_group.rvs(width, random_state=seed + 1)
    one, other = geometry.compare_matrices(a, b), geometry.compare_matrices(*turned)
    np.testing.assert_allclose(other.likeness, one.likeness, atol=1e-4)
    np.testing.assert_allclose(other.permuted, one.permuted, atol=1e-4)


def test_rows_of_0_and_lower_rank_are_left_out():
    a, b = normal(50, 6), normal(50, 6, seed=1)
    a[:, 5] = a[:, 4]
    zeros = np.zeros((2, 6))
    with_zeros = geometry.compare_matrices(np.vstack([a, zeros]), np.vstack([b, zeros]))
    assert with_zeros == geometry.compare_matrices(a, b)
    np.testing.assert_allclose(with_zeros.likeness, measured_otherwise(a, b), atol=1e-5)


@pytest.mark.untyped
def test_mistakes():
    with pytest.raises(ValueError, match="a has 4 rows and b has 5"):
        geometry.compare_matrices(np.ones((4, 2)), np.ones((5, 2)))
    with pytest.raises(ValueError, match="2 rows that are 0 in neither"):
        geometry.compare_matrices(np.eye(4)[:, :2], np.ones((4, 2)))


def test_what_is_compared_stays_as_it_is():
    tables = np.random.default_rng(0).standard_normal((2, 20, 3))  # of the dtype that is computed in
    before = tables.copy()
    geometry.compare_matrices(*tables)
    np.testing.assert_array_equal(tables, before)
