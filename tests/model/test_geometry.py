"""The geometry of one matrix, and how its rows move: against NumPy and SciPy, on planted structure, as invariances."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import linregress, ortho_group

from tied_lm import geometry
from tied_lm.bands import bands_of


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def cosine_matrix(rows):
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit @ unit.T


def mean_of_pairs(rows):
    return cosine_matrix(rows)[np.triu_indices(len(rows), 1)].mean()


def plant_cone(rows, width, seed=0):
    """Rows that share a direction, the rare ones (at the end) most."""
    return normal(rows, width, seed=seed) + np.linspace(0, 4, rows)[:, None] * np.eye(width)[0]


def zipf(rows):
    return 1 / np.arange(1, rows + 1)


@pytest.mark.parametrize(("rows", "width"), [(60, 7), (7, 60), (40, 40)])
def test_a_matrix_as_numpy_measures_it(rows, width):
    table = plant_cone(rows, width)
    found = geometry.measure_matrix(table, zipf(rows))
    singular = np.linalg.svd(table, compute_uv=False)
    p, norm = singular / singular.sum(), np.linalg.norm(table, axis=1)
    np.testing.assert_allclose(found.singular_values, singular, atol=1e-7 * singular[0])
    np.testing.assert_allclose(found.effective_rank, np.exp(-np.sum(p * np.log(p))), rtol=1e-6)
    np.testing.assert_allclose(found.participation_ratio, np.sum(singular**2) ** 2 / np.sum(singular**4), rtol=1e-9)
    np.testing.assert_allclose(found.mean_row, np.linalg.norm(table.mean(axis=0)) / norm.mean())
    np.testing.assert_allclose(found.mean_cosine, mean_of_pairs(table))
    np.testing.assert_allclose(found.norm_slope, linregress(np.log(zipf(rows)), norm).slope)
    _, _, axes = np.linalg.svd(table)
    z = np.exp(np.concatenate([table @ axes.T, -table @ axes.T], axis=1)).sum(axis=0)
    np.testing.assert_allclose(found.isotropy, z.min() / z.max(), rtol=1e-4)


def test_the_parts_by_themselves_are_those_of_the_whole():
    table, frequencies = plant_cone(50, 6), zipf(50)
    whole = geometry.measure_matrix(table, frequencies)
    assert geometry.effective_rank(whole.singular_values) == whole.effective_rank
    assert geometry.participation_ratio(whole.singular_values) == whole.participation_ratio
    assert geometry.mean_cosine(table) == whole.mean_cosine
    assert geometry.isotropy(table) == whole.isotropy
    assert geometry.norm_slope(table, frequencies) == whole.norm_slope


def test_bands_by_pairs_within_each():
    table, frequencies = plant_cone(80, 5), np.append(zipf(70), np.zeros(10))
    bands = bands_of(frequencies / frequencies.sum())
    found = geometry.measure_matrix(table, frequencies).mean_cosine_by_band
    assert list(found) == ["0", "1", "2", "3", "4", "unseen"]
    for band, value in enumerate(found.values()):
        rows = table[bands == band]
        np.testing.assert_allclose(value, mean_of_pairs(rows) if len(rows) > 1 else np.nan)
    assert found["unseen"] > found["3"] + 0.2


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_planted_rank_is_found(rank):
    basis = ortho_group.rvs(20, random_state=1)[:, :rank]
    table = np.linalg.qr(normal(200, rank))[0] @ basis.T * 5
    found = geometry.measure_matrix(table)
    assert found.effective_rank == pytest.approx(rank, rel=1e-5)
    assert found.participation_ratio == pytest.approx(rank, rel=1e-5)
    np.testing.assert_allclose(found.singular_values, [5] * rank + [0] * (20 - rank), atol=1e-6)


def test_a_planted_cone_is_found():
    spread, cone = normal(2000, 32), normal(2000, 32) + 8 * np.eye(32)[0]
    wide, narrow = geometry.measure_matrix(spread), geometry.measure_matrix(cone)
    assert abs(wide.mean_cosine) < 0.01
    assert narrow.mean_cosine == pytest.approx(64 / (64 + 32), abs=0.02)  # of the common square in the whole
    assert wide.mean_row < 0.05 < 0.8 < narrow.mean_row
    assert narrow.isotropy < 1e-3 < 0.5 < wide.isotropy


def test_a_planted_slope_is_found():
    frequencies, direction = zipf(300), normal(300, 9)
    unit = direction / np.linalg.norm(direction, axis=1, keepdims=True)
    assert geometry.norm_slope(unit * (10 + 0.7 * np.log(frequencies))[:, None], frequencies) == pytest.approx(0.7)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 40), st.integers(2, 12), st.floats(0.01, 100))
def test_rotation_changes_nothing_and_scale_only_what_has_a_unit(seed, rows, width, scale):
    table, frequencies = plant_cone(rows, width, seed), zipf(rows)
    turned = table @ ortho_group.rvs(width, random_state=seed)
    a, b = (geometry.measure_matrix(t, frequencies) for t in (table, turned))
    c = geometry.measure_matrix(scale * table, frequencies)
    for name in ("effective_rank", "participation_ratio", "mean_row", "mean_cosine"):
        np.testing.assert_allclose([getattr(b, name), getattr(c, name)], getattr(a, name), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(b.singular_values, a.singular_values, atol=1e-6 * a.singular_values[0])
    np.testing.assert_allclose(c.singular_values, scale * a.singular_values, atol=1e-6 * scale * a.singular_values[0])
    np.testing.assert_allclose(b.isotropy, a.isotropy, rtol=1e-4)
    np.testing.assert_allclose([b.norm_slope, c.norm_slope / scale], a.norm_slope, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(list(b.mean_cosine_by_band.values()), list(a.mean_cosine_by_band.values()), atol=1e-9)


def test_arrays_of_jax_and_of_half_width():
    table = plant_cone(30, 4).astype(np.float32)
    expected = geometry.mean_cosine(table)
    assert geometry.mean_cosine(jnp.asarray(table)) == expected
    assert geometry.mean_cosine(jnp.asarray(table, jnp.bfloat16)) == pytest.approx(expected, abs=0.01)


def test_undefined_is_nan():
    nothing = geometry.measure_matrix(np.zeros((4, 3)), np.ones(4))
    assert np.isnan([nothing.effective_rank, nothing.participation_ratio, nothing.mean_row]).all()
    assert np.isnan([nothing.mean_cosine, nothing.norm_slope]).all()
    assert geometry.mean_cosine(np.array([[1.0, 0], [0, 0], [1, 1]])) == pytest.approx(0.5**0.5)
    assert np.isnan(geometry.measure_matrix(np.ones((4, 3))).norm_slope)


@pytest.mark.parametrize(
    ("table", "frequencies", "message"),
    [
        ([[1.0]], None, "table is a list"),
        (np.ones(3), None, "table is an array"),
        (np.array([[1.0, np.nan]]), None, "table has entries that are not finite"),
        (np.ones((3, 2)), np.ones(2), r"frequencies has shape \(2,\)"),
        (np.ones((2, 2)), np.array([1.0, -1]), "frequencies"),
    ],
)
@pytest.mark.untyped
def test_a_mistake_names_the_argument(table, frequencies, message):
    with pytest.raises(ValueError, match=message):
        geometry.measure_matrix(table, frequencies)


def test_planted_drift():
    start, direction = normal(6, 3), np.zeros((6, 3))
    direction[:5] = normal(5, 3, seed=1)
    lengths = [0.0, 1.0, 3.0, 2.0]  # forth, forth, back; row 5 rests
    found = geometry.measure_drift(start + length * direction for length in lengths)
    norm = np.linalg.norm(direction, axis=1)
    np.testing.assert_allclose(found.path, 4 * norm, atol=1e-12)
    np.testing.assert_allclose(found.displacement, 2 * norm, atol=1e-12)
    np.testing.assert_allclose(found.distance_to_previous, norm, atol=1e-12)
    np.testing.assert_allclose(found.straightness, [0.5] * 5 + [np.nan])
    assert found.measurements == 4
    last, previous = start + 2 * direction, start + 3 * direction
    for values, other in ((found.cosine_to_start, start), (found.cosine_to_previous, previous)):
        dot = (last * other).sum(axis=1) / np.linalg.norm(last, axis=1) / np.linalg.norm(other, axis=1)
        np.testing.assert_allclose(values, dot)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_a_way_is_never_shorter_than_its_ends_are_apart(seed, count):
    steps = np.cumsum(normal(count, 7, 4, seed=seed), axis=0)
    found = geometry.measure_drift(steps)
    assert (found.straightness <= 1 + 1e-12).all()
    turned = geometry.measure_drift(10 * steps @ ortho_group.rvs(4, random_state=seed))
    np.testing.assert_allclose(turned.path, 10 * found.path)
    np.testing.assert_allclose(turned.cosine_to_start, found.cosine_to_start, atol=1e-12)


@pytest.mark.untyped
def test_drift_of_too_few_or_unlike_matrices():
    with pytest.raises(ValueError, match="matrices has 1"):
        geometry.measure_drift([np.ones((2, 2))])
    with pytest.raises(ValueError, match=r"matrices\[1\] \(3, 2\) and matrices\[0\] \(2, 2\) differ"):
        geometry.measure_drift([np.ones((2, 2)), np.ones((3, 2))])


def test_common_drift_against_a_loop():
    update, bands = normal(12, 4), np.array([0, 1, 1, 2, 2, 2, 2, 2, 5, 5, 5, 5])
    update[5] = 0
    found = geometry.common_drift(update, bands)
    for row in range(12):
        others = [u for u in range(12) if bands[u] == bands[row] and u != row]
        expected = np.nan
        if others and update[row].any():
            mean = update[others].mean(axis=0)
            expected = update[row] @ mean / np.linalg.norm(update[row]) / np.linalg.norm(mean)
        np.testing.assert_allclose(found.cosine[row], expected, err_msg=str(row))
    assert list(found.cosine_by_band) == ["0", "1", "2", "unseen"]
    assert np.isnan(found.cosine_by_band["0"])
    np.testing.assert_allclose(found.cosine_by_band["2"], np.nanmean(found.cosine[3:8]))


def test_rows_that_move_together_are_told_from_those_that_do_not():
    update, bands = normal(2000, 16), np.repeat([0, 4], 1000)
    update[1000:] += 8 * np.eye(16)[3]
    found = geometry.common_drift(update, bands).cosine_by_band
    assert abs(found["0"]) < 0.02
    assert found["4"] > 0.8
