"""The split against float64 NumPy, autodiff and finite differences."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.model.reference import PARTS, SCHEMES, TOLERANCE, Case, Drawn, draw, loss_by_use, make_cases, reference, wide
from tied_lm import TiedEmbedding, loss_and_gradients, row_stats, split_gradients
from tied_lm.bands import describe
from tied_lm.model import split as gradients


@jax.jit(static_argnums=0)
def measure(model, params, inputs, targets, mask):
    """Loss, gradients, tables by part, and row statistics as the package gives them."""
    loss, grads, stats = loss_and_gradients(model, params, inputs, targets, mask=mask, rows=True)
    if mask is None:
        split = split_gradients(model, params, inputs, targets)
        return loss, grads, {part: getattr(split, part) for part in PARTS}, stats
    t = gradients.tables(gradients.backward(model, params, inputs, targets, mask=mask))
    scoring = t.expected - t.data
    parts = (t.lookup, scoring, t.own - t.data, t.expected - t.own, t.lookup + scoring)
    return loss, grads, dict(zip(PARTS, parts, strict=True)), stats


@jax.jit(static_argnums=0)
def autodiff(model, params, inputs, targets, mask):
    """The gradient of the loss as anyone would write it, which knows nothing of the split."""

    def loss(params):
        logits = model.apply({"params": params}, inputs)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(nll * mask) / jnp.sum(mask)

    return jax.grad(loss)(params)


def row_norms(table):
    return np.linalg.norm(np.asarray(table, np.float64), axis=-1)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(13))
def test_split_is_that_of_float64_on_four_random_draws(index):
    case = make_cases()[index]
    for seed in range(4 * index, 4 * index + 4):
        drawn = draw(case, seed, zipf=seed % 2 == 1)
        ref = reference(drawn)
        loss, grads, tables, stats = jax.tree.map(np.asarray, measure(case.model, *drawn))
        assert loss == pytest.approx(ref.loss, rel=1e-5, abs=1e-5)

        sums = (ref.expected, ref.data, ref.lookup)
        scale = max(np.abs(table).max() for table in sums)
        norm_scale = max(row_norms(table).max() for table in sums)
        for part in PARTS:
            exact = getattr(ref, part)
            np.testing.assert_allclose(tables[part], exact, rtol=0, atol=TOLERANCE * scale, err_msg=part)
            norms = getattr(stats, part)
            np.testing.assert_allclose(norms, row_norms(exact), rtol=0, atol=TOLERANCE * norm_scale, err_msg=part)

        untied = {"embedding": ref.lookup, "output": ref.scoring}
        for name, exact in (untied if case.tying == "untied" else {"embedding": ref.total}).items():
            np.testing.assert_allclose(grads[name], exact, rtol=0, atol=2 * TOLERANCE * scale)

        rows = np.arange(case.vocab_size)
        kept = np.ones(case.shape, bool) if drawn.mask is None else drawn.mask
        assert stats.input_count.tolist() == [(drawn.inputs == v).sum() for v in rows]
        assert stats.target_count.tolist() == [(drawn.targets[kept] == v).sum() for v in rows]
        assert not tables["lookup"][stats.input_count == 0].any()

        lookup, scoring = row_norms(ref.lookup), row_norms(ref.scoring)
        both = (lookup > TOLERANCE * norm_scale) & (scoring > TOLERANCE * norm_scale)
        cosine = (ref.lookup * ref.scoring).sum(-1)[both] / (lookup * scoring)[both]
        limit = TOLERANCE * norm_scale * (1 / lookup[both] + 1 / scoring[both])
        assert (np.abs(stats.cosine[both] - cosine) <= 2 * limit).all()
        assert not stats.cosine[(stats.lookup == 0) | (stats.scoring == 0)].any()

        some = np.random.default_rng(seed).random(case.vocab_size) < 0.5
        some[drawn.inputs.ravel()[0]] = True
        told = describe(jax.tree.map(lambda field, some=some: field[some], stats))
        a, b = np.linalg.norm(ref.lookup[some]), np.linalg.norm(ref.scoring[some])
        if min(a, b) > 1e-2 * norm_scale:
            assert told["share"] == pytest.approx(a**2 / (a**2 + b**2), abs=2e-3)
            assert told["cosine"] == pytest.approx(np.sum(ref.lookup[some] * ref.scoring[some]) / (a * b), abs=2e-3)


SMALL = [Case(7, 4, (3, 3), tying, body, False) for tying in SCHEMES for body in (False, True)]
SMALL_IDS = [f"{case.tying}-{'mlp' if case.body else 'none'}" for case in SMALL]


@pytest.mark.parametrize("case", SMALL, ids=SMALL_IDS)
def test_parts_are_what_finite_differences_of_the_loss_by_use_say(case):
    drawn = draw(case, 5, scale=0.7)
    tables = measure(case.model, *drawn)[2]
    lookup_matrix, scoring_matrix, _ = wide(drawn.params)
    base = (lookup_matrix, scoring_matrix, scoring_matrix)
    # Which uses move: the pull is the slope through the targets' scores alone, the push through the others.
    moved = {"lookup": (1, 0, 0), "scoring": (0, 1, 1), "pull": (0, 1, 0), "push": (0, 0, 1), "total": (1, 1, 1)}
    rng, step = np.random.default_rng(0), 1e-5
    for part, uses in moved.items():
        for _ in range(2):
            direction = rng.standard_normal(scoring_matrix.shape)
            ahead, behind = (
                loss_by_use(drawn, *(m + sign * step * use * direction for m, use in zip(base, uses, strict=True)))
                for sign in (1, -1)
            )
            slope = np.sum(np.asarray(tables[part], np.float64) * direction)
            assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-4, abs=2e-6), part


@pytest.mark.parametrize("case", [*SMALL, SMALL[1]._replace(masked=True)], ids=[*SMALL_IDS, "tied-mlp-masked"])
def test_gradients_are_those_of_autodiff(case):
    drawn = draw(case, 6, scale=0.7)
    _, grads, tables, _ = measure(case.model, *drawn)
    expected = autodiff(case.model, *drawn[:3], drawn.mask if case.masked else np.ones(case.shape, bool))
    assert_close(grads, expected)
    if case.tying == "tied":
        assert_close(tables["lookup"] + tables["scoring"], expected["embedding"])
    else:
        assert_close((tables["lookup"], tables["scoring"]), (expected["embedding"], expected["output"]))
    assert_close(tables["scoring"].sum(0), np.zeros(case.features))
    assert_close(tables["pull"] + tables["push"], tables["scoring"])
    assert float(np.abs(tables["scoring"]).max()) > 1e-2


TIED, UNTIED = SMALL[1], SMALL[3]


backward = jax.jit(gradients.backward, static_argnums=0)
sum_rule_residual = jax.jit(gradients.sum_rule_residual, static_argnums=0)


def residual(case, drawn, change=lambda b: b):
    b = jax.tree.map(np.asarray, backward(case.model, *drawn[:3]))
    return float(sum_rule_residual(case.model, change(b)))


def test_sum_rule_holds_and_catches_a_wrong_lookup():
    drawn = draw(TIED, 7, scale=0.7)
    assert residual(TIED, drawn) < 1e-6
    assert residual(TIED, drawn, lambda b: b._replace(lookup=1.1 * b.lookup)) > 1e-3

    def last_of_each_row(b):  # what a scatter that sets, instead of adding, would leave
        seen = np.array([v not in b.inputs[t + 1 :] for t, v in enumerate(b.inputs)])
        assert not seen.all()
        return b._replace(lookup=b.lookup * seen[:, None])

    assert residual(TIED, drawn, last_of_each_row) > 1e-3


def test_sum_rule_of_the_untied_output_subtracts_nothing():
    drawn = draw(UNTIED, 7, scale=0.7)
    assert residual(UNTIED, drawn) < 1e-6

    def as_if_tied(b):
        return b._replace(gradients=b.gradients | {"output": b.gradients["output"] + b.gradients["embedding"]})

    assert residual(UNTIED, drawn, as_if_tied) > 1e-3


def test_a_lookup_table_in_the_wrong_rows_differs_from_autodiff(monkeypatch):
    drawn = draw(TIED, 8, scale=0.7)
    params, inputs, targets, _ = drawn
    expected = autodiff(TIED.model, params, inputs, targets, np.ones(TIED.shape, bool))["embedding"]

    def gap():
        split = jax.jit(lambda params: split_gradients(TIED.model, params, inputs, targets))(params)
        return float(np.abs(split.lookup + split.scoring - expected).max())

    assert gap() < 1e-6
    right = gradients.tables
    monkeypatch.setattr(gradients, "tables", lambda b: right(b._replace(inputs=b.scoring.targets)))
    assert gap() > 1e-2


def test_absent_rows_have_no_lookup_but_are_scored():
    drawn = draw(TIED, 9, scale=0.7)
    stats = measure(TIED.model, *drawn)[3]
    absent = np.asarray(stats.input_count) == 0
    assert 0 < absent.sum() < TIED.vocab_size
    assert (np.asarray(stats.lookup)[absent] == 0).all()
    assert (np.asarray(stats.cosine)[absent] == 0).all()
    assert (np.asarray(stats.scoring)[absent] > 0).all()


def test_repeated_tokens_add_up_before_the_norm():
    # Nine times the same pair: the row is asked for the mean of nine equal vectors, which is one of them.
    drawn = draw(SMALL[0], 9, scale=0.7)._replace(inputs=np.full((3, 3), 0), targets=np.full((3, 3), 2))
    w = np.asarray(drawn.params["embedding"], np.float64)
    p = np.exp(w @ w[0])
    stats = measure(SMALL[0].model, *drawn)[3]
    assert float(stats.lookup[0]) == pytest.approx(np.linalg.norm(p / p.sum() @ w - w[2]), rel=1e-5)


def test_a_batch_that_is_all_masked_has_no_loss_and_no_gradient():
    drawn = draw(TIED._replace(masked=True), 10)
    loss, grads, tables, stats = measure(TIED.model, *drawn[:3], np.zeros_like(drawn.mask))
    assert float(loss) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves((grads, tables)))
    assert (int(stats.target_count.sum()), int(stats.input_count.sum())) == (0, drawn.inputs.size)


def test_masked_targets_do_not_count_at_all():
    drawn = draw(TIED._replace(masked=True), 11, scale=0.7)
    other = np.where(drawn.mask, drawn.targets, (drawn.targets + 1) % TIED.vocab_size)
    a, b = (measure(TIED.model, drawn.params, drawn.inputs, t, drawn.mask) for t in (drawn.targets, other))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_jit_and_eager_agree_and_rows_change_nothing():
    case = SMALL[2]
    drawn = draw(case, 12, scale=0.7)
    jitted = measure(case.model, *drawn)
    for rows in (False, True):
        loss, grads, eager_stats = loss_and_gradients(case.model, *drawn[:3], rows=rows)
        assert_close((loss, grads), jitted[:2])
        assert (eager_stats is None) != rows
    alone = jax.jit(row_stats, static_argnums=0)(case.model, *drawn[:3])
    assert_close((alone, eager_stats), (jitted[3], jitted[3].marked()))


def test_what_is_undefined_is_zero_on_the_device_and_nan_where_it_is_returned():
    """Even where JAX is told to stop at the first NaN."""
    drawn = draw(TIED, 9, scale=0.7)
    absent = np.bincount(drawn.inputs.ravel(), minlength=TIED.vocab_size) == 0
    assert 0 < absent.sum() < TIED.vocab_size
    jitted = jax.jit(row_stats, static_argnums=0)(TIED.model, *drawn[:3])
    with jax.debug_nans(True):
        eager = row_stats(TIED.model, *drawn[:3])
        loss, gradient, _ = loss_and_gradients(TIED.model, *drawn[:3], mask=np.zeros(TIED.shape, bool))
    assert not jitted.cosine[absent].any()
    for stats in (eager, jitted.marked(), jax.device_get(jitted).marked()):
        np.testing.assert_array_equal(np.isnan(stats.cosine), absent)
        assert all(np.isfinite(field).all() for name, field in stats._asdict().items() if name != "cosine")
    assert np.isnan(loss)  # the mean of no tokens
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, *, train=False):
        return x + jax.random.normal(self.make_rng("dropout"), x.shape) if train else x


def test_the_body_gets_its_mode_and_its_random_keys():
    drawn, model = draw(SMALL[0], 13, scale=0.7), TiedEmbedding(7, 4, Noisy())
    run = jax.jit(loss_and_gradients, static_argnums=0, static_argnames="train")

    def loss(seed, train):
        return float(run(model, *drawn[:3], rngs={"dropout": jax.random.key(seed)}, train=train)[0])

    assert loss(0, False) == loss(1, False)
    assert len({loss(0, False), loss(0, True), loss(1, True)}) == 3


@pytest.mark.parametrize("tying", SCHEMES)
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_logits_stay_finite_and_exact(tying, sign):
    # Scores of 80 and -80, with the target at the top (sign 1) or at the bottom.
    rows = np.array([[8, 4, 0, 0], [-8, -4, 0, 0], [0, 0, 8, 4], [0, 0, -8, -4], [1, 1, 1, 1], [5, 0, 0, 0], [0] * 4])
    case = SMALL[0]._replace(tying=tying)
    inputs = np.arange(9).reshape(3, 3) % 4
    params = {name: rows.astype(np.float32) for name in case.model.vocabulary}
    drawn = Drawn(params, inputs, inputs if sign > 0 else inputs ^ 1, None)
    loss, grads, tables, stats = measure(case.model, *drawn)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, grads, tables, stats)))
    ref = reference(drawn)
    assert float(loss) == pytest.approx(ref.loss, abs=1e-5)
    scale = max(np.abs(table).max() for table in (ref.expected, ref.data, ref.lookup))
    for part in PARTS:
        np.testing.assert_allclose(tables[part], getattr(ref, part), rtol=0, atol=TOLERANCE * scale)
