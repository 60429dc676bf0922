"""What is predicted, against float64 NumPy with all logits at once; and the shares of the split, measured both ways."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import entropy, ortho_group

from tied_lm import TiedEmbedding, UntiedEmbedding, geometry, split_gradients
from tied_lm.bands import bands_of
from tied_lm.model.bodies import Mlp
from tied_lm.model.geometry import predictions


def draw(tokens, rows, width, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    h, scoring = scale * rng.standard_normal((tokens, width)), rng.standard_normal((rows, width))
    return h.astype(np.float32), scoring.astype(np.float32), rng.integers(rows, size=tokens)


def reference(h, scoring, targets, frequencies, soft_cap=None):
    logits = h.astype(np.float64) @ scoring.T.astype(np.float64)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    p = np.exp(log_softmax(logits, axis=1))
    gradient = p - np.eye(len(scoring))[targets]
    basis = np.linalg.svd(scoring.astype(np.float64), full_matrices=False)
    basis = basis.U[:, basis.S / basis.S[0] > 1e-5]
    confidence, right = p.max(axis=1), p.argmax(axis=1) == targets
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean()) if inside.any() else 0
    f = frequencies / frequencies.sum()
    with np.errstate(divide="ignore"):
        log_ratio = np.log(p.mean(axis=0) / f)
    bands = bands_of(f)
    return geometry.Predictions(
        {str(band): log_ratio[bands == band].mean() for band in np.unique(bands[f > 0])},
        logits.max(axis=1).mean(),
        logits.max(),
        np.log(np.exp(logits).sum(axis=1)).mean(),
        np.log(np.exp(logits).sum(axis=1)).max(),
        error,
        np.sum((gradient @ basis) ** 2) / np.sum(gradient**2),
        basis.shape[1] / len(scoring),
        entropy(p, axis=1).mean(),
        len(h),
    )


def assert_same(found, expected, rtol=2e-5):
    assert list(found[0]) == list(expected[0])
    np.testing.assert_allclose(list(found[0].values()), list(expected[0].values()), rtol=rtol, atol=1e-5)
    for name, value in expected._asdict().items():
        if name != "log_ratio_by_band":
            np.testing.assert_allclose(getattr(found, name), value, rtol=rtol, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_as_numpy_measures_it(monkeypatch, blocks, soft_cap, scale):
    monkeypatch.setattr(predictions, "block_count", lambda *_: blocks)
    h, scoring, targets = draw(50, 30, 6, scale)
    frequencies = np.append(1 / np.arange(1, 26), np.zeros(5))
    found = geometry.measure_predictions(h, scoring, targets, frequencies, soft_cap=soft_cap)
    assert_same(found, reference(h, scoring, targets, frequencies, soft_cap))


def test_a_gradient_in_the_column_space_is_seen_whole_and_one_beside_it_not_at_all():
    # p - y = (-3, 1, 1, 1) / 4, of which (-1, -1, 1, 1) / 4 and (-2, 2, 0, 0) / 4 lie in these column spaces.
    for column, inside in (([1.0, 1, -1, -1], 1 / 3), ([1.0, -1, 0, 0], 2 / 3), ([0.0, 1, -1, 0], 0)):
        scoring = np.stack([column, np.zeros(4)], axis=1)  # of rank 1
        found = geometry.measure_predictions(np.zeros((1, 2)), scoring, np.array([0]))
        assert found.column_space_share_by_chance == 0.25
        assert found.column_space_share == pytest.approx(inside, abs=1e-7)
    whole = geometry.measure_predictions(np.zeros((1, 4)), np.eye(4), np.array([2]))
    assert (whole.column_space_share, whole.column_space_share_by_chance) == pytest.approx((1, 1))


def test_a_planted_error_of_calibration():
    # Always 0.9 for row 0, which is right in 3 of 5.
    logit = np.log(0.9 / 0.1)
    h, scoring = np.full((10, 1), logit), np.array([[1.0], [0]])
    found = geometry.measure_predictions(h, scoring, np.array([0, 0, 0, 1, 1] * 2))
    assert found.calibration_error == pytest.approx(0.3)


def test_planted_under_prediction():
    # Every row is predicted alike, whatever its frequency.
    frequencies = 1 / np.arange(1, 101)
    found = geometry.measure_predictions(np.zeros((3, 2)), np.ones((100, 2)), np.zeros(3, int), frequencies)
    share = frequencies / frequencies.sum()
    assert found.log_ratio_by_band["4"] == pytest.approx(np.log(0.01 / share[bands_of(share) == 4]).mean())
    assert found.log_ratio_by_band["0"] < 0 < found.log_ratio_by_band["4"]


def test_very_sure_and_right():
    found = geometry.measure_predictions(np.array([[300.0]]), np.array([[1.0], [0], [-1]]), np.array([0]))
    assert found.entropy == found.calibration_error == 0
    assert np.isnan(found.column_space_share)  # of no gradient
    assert found.log_sum_exp_max == found.largest_logit_max == 300


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_rotation_of_both_changes_nothing(seed):
    h, scoring, targets = draw(20, 12, 4, seed=seed)
    turn = ortho_group.rvs(4, random_state=seed)
    frequencies = 1 / np.arange(1, 13)
    one = geometry.measure_predictions(h, scoring, targets, frequencies)
    other = geometry.measure_predictions(h @ turn, 10 * scoring @ turn / 10, targets, frequencies)
    assert_same(other, one, rtol=1e-3)


@pytest.mark.parametrize(
    ("h", "targets", "message"),
    [
        (np.zeros((2, 3)), np.array([0, 1]), "differ in width"),
        (np.zeros((2, 2)), np.array([0, 5]), "has 5"),
        (np.zeros((2, 2)), np.array([0]), r"targets has shape \(1,\)"),
        (np.zeros((2, 2)), np.array([0.5, 1]), "integers"),
    ],
)
@pytest.mark.untyped
def test_a_mistake_names_the_argument(h, targets, message):
    with pytest.raises(ValueError, match=message):
        geometry.measure_predictions(h, np.zeros((5, 2)) + 1, targets)


@pytest.mark.parametrize("kind", [TiedEmbedding, UntiedEmbedding])
def test_shares_of_the_split_and_as_measured_before_the_scatter(kind):
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(6, size=(2, 3, 5))  # more tokens than rows: they repeat
    model = kind(9, 4, Mlp())
    params = model.init(jax.random.key(1), inputs)["params"]
    found = geometry.measure_shares(model, params, inputs, targets)
    whole = split_gradients(model, params, inputs, targets)
    lookup, scoring = np.linalg.norm(whole.lookup), np.linalg.norm(whole.scoring)
    by_position = jax.grad(lambda table: loss_of(model, params, table, inputs, targets))(params["embedding"][inputs])
    before = np.linalg.norm(by_position)
    expected = (lookup, scoring, before, lookup**2 / (lookup**2 + scoring**2), lookup / (lookup + scoring))
    expected += (before**2 / (before**2 + scoring**2), before / (before + scoring))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(found.lookup_before_scatter - found.lookup) > 0.01 * found.lookup


def loss_of(model, params, vectors, inputs, targets):
    """The mean loss with looked-up vectors in place of a lookup: each position has a row of its own."""
    rows = vectors.reshape(-1, vectors.shape[-1])
    body = model.body.apply({"params": params["body"]}, rows, train=False)
    logits = body @ params[model.scorer].T
    return -jax.nn.log_softmax(logits)[np.arange(targets.size), targets.reshape(-1)].mean()


def test_tokens_that_do_not_repeat_have_one_norm_before_and_after():
    model = TiedEmbedding(9, 4)
    ids = np.arange(8)
    params = {"embedding": np.random.default_rng(2).standard_normal((9, 4)).astype(np.float32)}
    found = geometry.measure_shares(model, params, ids, ids + 1)
    assert found.lookup_before_scatter == pytest.approx(found.lookup, rel=1e-6)
    assert found.squared_before_scatter == pytest.approx(found.squared, rel=1e-6)
