"""Every tying scheme: its split against finite differences of a float64 loss of two matrices, parameters, start.

The loss is written down here once more, in NumPy, with the vocabulary parameters once for the lookup and once for the
scoring; its derivatives are central differences. So the reference knows nothing of the package or of autodiff.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

from tests.linen import jit
from tests.model.test_bodies_transformer import by_hand
from tied_lm import loss_and_gradients, row_stats, split_gradients
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.model import split as gradients
from tied_lm.model.bodies import Mlp, Transformer
from tied_lm.model.embedding import TiedEmbedding, UntiedEmbedding, count_parameters
from tied_lm.model.schemes import SCHEMES
from tied_lm.train.build import build_model

V, D, R = 7, 4, 3
BANDS = (0, 1, 4, 2, 5, 3, 4)
INPUTS = np.array([[0, 2, 0, 5], [4, 2, 6, 3]])
TARGETS = np.array([[2, 4, 1, 2], [6, 0, 4, 4]])
OPTIONS = {
    "soft_cap": {"soft_cap": 1.5},
    "projection": {"projection_penalty": 0.3},
    "width_scaled": {"readout_multiplier": 0.7, "base_features": 6},
    "path_weights": {"lookup_weight": 2.5, "scoring_weight": 0.4},
    "gated_rare_rows": {"rare_band": 4, "gate_from_frequent": 0.2, "gate_from_rare": 0.6},
    "low_rank": {"rank": 2},
    "factorised": {"factor_features": R},
}


def gelu(x):
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def mlp(p, x):
    hidden = gelu(x @ p["up"]["kernel"] + p["up"]["bias"])
    return x + hidden @ p["down"]["kernel"] + p["down"]["bias"]


TRANSFORMER = Transformer(heads=2, width=6)
BODIES = {
    "none": (None, lambda p, x: x),
    "mlp": (Mlp(), mlp),
    "transformer": (TRANSFORMER, lambda p, x: np.array([by_hand(TRANSFORMER, p, one) for one in x])),
}


def spd(p):
    """T of the scheme of that name."""
    c = np.zeros((D, D))
    c[np.tril_indices(D)] = p["triangle"]
    c[np.diag_indices(D)] = np.exp(np.diag(c))
    return c @ c.T


class Formula(NamedTuple):
    """A scheme as CLAIMS of the literature write it: p are its parameters, the rows x those that the ids select."""

    look_up: Callable = lambda p, x: x
    logits: Callable = lambda p, h: h @ p["embedding"].T
    parameters: int = V * D
    penalty: Callable = lambda p: 0.0
    weights: tuple[float, float] = (1.0, 1.0)


FORMULAS = {
    "tied": Formula(),
    "untied": Formula(logits=lambda p, h: h @ p["output"].T, parameters=2 * V * D),
    "scaled_input": Formula(look_up=lambda p, x: 2.0 * x),
    "scaled_output": Formula(logits=lambda p, h: h @ p["embedding"].T / 2),
    "soft_cap": Formula(logits=lambda p, h: 1.5 * np.tanh(h @ p["embedding"].T / 1.5)),
    "projection": Formula(
        logits=lambda p, h: h @ p["projection"] @ p["embedding"].T,
        parameters=V * D + D * D,
        penalty=lambda p: 0.3 * np.sqrt(np.sum(p["projection"] ** 2)),
    ),
    "width_scaled": Formula(logits=lambda p, h: 0.7 / (D / 6) * h @ p["embedding"].T),
    # With two matrices, which have the same values as long as they are tied, and need not have them here.
    "late_untie": Formula(logits=lambda p, h: h @ p["output"].T, parameters=2 * V * D),
    "centred": Formula(),
    "path_weights": Formula(weights=(2.5, 0.4)),
    "lookup_only": Formula(weights=(1.0, 0.0)),
    "scoring_only": Formula(weights=(0.0, 1.0)),
    "gated_rare_rows": Formula(),
    "low_rank": Formula(
        logits=lambda p, h: h @ (p["embedding"] + p["low_rank_rows"] @ p["low_rank_columns"]).T,
        parameters=V * D + 2 * (V + D),
    ),
    "factorised": Formula(
        look_up=lambda p, x: x @ p["factor"],
        logits=lambda p, h: h @ (p["embedding"] @ p["factor"]).T,
        parameters=V * R + R * D,
    ),
    "spd_pair": Formula(
        look_up=lambda p, x: x @ np.linalg.inv(spd(p)),
        logits=lambda p, h: (h @ spd(p)) @ p["embedding"].T,
        parameters=V * D + D * (D + 1) // 2,
    ),
}


def make(name, body="none", **more):
    return SCHEMES[name](V, D, BODIES[body][0], bands=BANDS, **(OPTIONS.get(name, {}) | more))


def draw(model, seed=0):
    """Values for all parameters, large enough for every term to count."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0), INPUTS)["params"]
    return jax.tree.map(lambda leaf: (0.6 * rng.standard_normal(leaf.shape)).astype(np.float32), shapes)


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def log_probabilities(name, body, p_lookup, p_scoring):
    """(N, V), with the scheme's parameters once for each use."""
    f, forward = FORMULAS[name], BODIES[body][1]
    h = forward(p_lookup.get("body"), f.look_up(p_lookup, p_lookup["embedding"][INPUTS]))
    logits = f.logits(p_scoring, h).reshape(-1, V)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def nll(name, body, p_lookup, p_scoring):
    return -np.mean(log_probabilities(name, body, p_lookup, p_scoring)[np.arange(TARGETS.size), TARGETS.ravel()])


def differences(f, x, step=1e-5):
    """Central differences of f in every entry of x."""
    found = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        e = np.zeros_like(x)
        e[i] = step
        found[i] = (f(x + e) - f(x - e)) / (2 * step)
    return found


def by_path(name, body, p, leaf):
    """Gradients of the loss in one parameter, in its use by the lookup and in that by the scoring, unweighted."""
    return (
        differences(lambda x: nll(name, body, p | {leaf: x}, p), p[leaf]),
        differences(lambda x: nll(name, body, p, p | {leaf: x}) + FORMULAS[name].penalty(p | {leaf: x}), p[leaf]),
    )


def push_by_target(name, body, p, h):
    """The push of plain tying from tokens with a frequent and with a rare target, summed token by token."""
    prob, rare = np.exp(log_probabilities(name, body, p, p)), np.array(BANDS) >= 4
    parts = np.zeros((2, V, D))
    for t, y in enumerate(TARGETS.ravel()):
        for v in range(V):
            if v != y:
                parts[int(rare[y]), v] += prob[t, v] * h[t] / TARGETS.size
    return parts


@partial(jit, static_argnums=0)
def measure(model, params):
    """Loss, gradients, tables, and statistics of as many tokens as rows and of fewer, which never form the tables."""
    loss, found, stats = loss_and_gradients(model, params, INPUTS, TARGETS, rows=True)
    few = INPUTS[0], TARGETS[0]
    compact = row_stats(model, params, *few), split_gradients(model, params, *few)
    residual = gradients.sum_rule_residual(model, gradients.backward(model, params, INPUTS, TARGETS))
    return loss, found, split_gradients(model, params, INPUTS, TARGETS), stats, compact, residual


_init = jit(lambda model, key: model.init(key, INPUTS)["params"], static_argnums=0)


def assert_statistics(stats, split):
    for part in ("lookup", "scoring", "pull", "push", "total"):
        norms = np.linalg.norm(getattr(split, part), axis=1)
        np.testing.assert_allclose(getattr(stats, part), norms, rtol=1e-4, atol=1e-6, err_msg=part)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_split_is_that_of_a_loss_of_two_matrices(name, body):
    model = make(name, body)
    params = draw(model)
    p, f = as_float64(params), FORMULAS[name]
    loss, found, split, stats, compact, _ = measure(model, params)
    assert_statistics(stats, split)
    assert_statistics(*compact)
    split = as_float64(split._asdict())
    scorer = "output" if name in ("untied", "late_untie") else "embedding"
    lookup, scoring = by_path(name, body, p, "embedding")[0], by_path(name, body, p, scorer)[1]
    alpha, beta = f.weights
    lookup, scoring = alpha * lookup, beta * scoring
    scale = max(np.abs(lookup).max(), np.abs(scoring).max())
    assert float(loss) == pytest.approx(nll(name, body, p, p), rel=1e-6)
    np.testing.assert_allclose(split["lookup"], lookup, rtol=0, atol=1e-5 * scale)
    if name == "gated_rare_rows":
        h = BODIES[body][1](p.get("body"), p["embedding"][INPUTS]).reshape(-1, D)
        from_frequent, from_rare = push_by_target(name, body, p, h)
        rare = (np.array(BANDS) >= 4)[:, None]
        pull = scoring - from_frequent - from_rare
        from_frequent, from_rare = np.where(rare, 0.2, 1) * from_frequent, np.where(rare, 0.6, 1) * from_rare
        np.testing.assert_allclose(split["push_parts"]["push_from_frequent"], from_frequent, rtol=0, atol=1e-5 * scale)
        np.testing.assert_allclose(split["push_parts"]["push_from_rare"], from_rare, rtol=0, atol=1e-5 * scale)
        scoring = pull + from_frequent + from_rare
    np.testing.assert_allclose(split["scoring"], scoring, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(split["pull"] + split["push"], scoring, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(split["total"], lookup + scoring, rtol=0, atol=1e-5 * scale)
    received = {
        "untied": {"embedding": lookup, "output": scoring},
        "late_untie": {"embedding": 0 * lookup, "output": lookup + scoring},  # before its step
    }.get(name, {"embedding": lookup + scoring})
    for leaf, exact in received.items():
        np.testing.assert_allclose(found[leaf], exact, rtol=0, atol=2e-5 * scale)
    for leaf in model.others:
        paths = by_path(name, body, p, leaf)
        for use, exact in zip(split["others"], paths, strict=True):
            np.testing.assert_allclose(use[leaf], exact, rtol=0, atol=1e-5 * max(scale, np.abs(exact).max()))
        np.testing.assert_allclose(found[leaf], sum(paths), rtol=0, atol=2e-5 * max(scale, np.abs(sum(paths)).max()))


@pytest.mark.parametrize("name", SCHEMES)
def test_pull_is_what_the_targets_ask_for(name):
    # pull[v] = -(1/N) sum over y_t = v of (1 - p_t[v]) slope_t d(z_t[v])/d(row), the derivative in h's place of the
    # scheme: taken as the change of z_t[v] with the row, since z is linear in it.
    model = make(name)
    params = draw(model, seed=1)
    p, f = as_float64(params), FORMULAS[name]
    scorer = "output" if name in ("untied", "late_untie") else "embedding"
    prob = np.exp(log_probabilities(name, "none", p, p))
    x = f.look_up(p, p["embedding"][INPUTS]).reshape(-1, D)
    pull = np.zeros_like(p[scorer])
    for t, y in enumerate(TARGETS.ravel()):
        rows = p[scorer].copy()

        def logit(row, t=t, y=y, rows=rows):
            return f.logits(p | {scorer: np.concatenate([rows[:y], row[None], rows[y + 1 :]])}, x)[t, y]

        pull[y] -= (1 - prob[t, y]) * differences(logit, rows[y]) / TARGETS.size
    split = measure(model, params)[2]
    np.testing.assert_allclose(split.pull, f.weights[1] * pull, rtol=0, atol=1e-5 * np.abs(pull).max())


@pytest.mark.parametrize("name", SCHEMES)
def test_the_sum_rule_holds_or_its_reason_is_stated(name):
    model = make(name, "mlp")
    residual = float(measure(model, draw(model))[-1])
    assert (residual < 1e-5) == (not model.no_sum_rule)
    assert (name in ("soft_cap", "gated_rare_rows")) == bool(model.no_sum_rule)


def test_a_wrong_lookup_breaks_the_sum_rule():
    model = make("factorised")
    b = gradients.backward(model, draw(model), INPUTS, TARGETS)
    assert float(gradients.sum_rule_residual(model, b._replace(lookup=1.01 * b.lookup))) > 1e-4


@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_by_formula(name):
    model = make(name, "mlp")
    counts = count_parameters(model)
    assert counts["vocabulary"] == FORMULAS[name].parameters
    assert counts["saved"] == 2 * V * D - FORMULAS[name].parameters
    params = _init(model, jax.random.key(0))
    assert counts["total"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert {*model.vocabulary, *model.others, "body"} == set(params)


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"factorised"}))
def test_every_scheme_starts_from_the_same_embedding(name):
    starts = [_init(scheme, jax.random.key(5)) for scheme in (make(name, "mlp"), make("tied", "mlp"))]
    np.testing.assert_array_equal(starts[0]["embedding"], starts[1]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, starts[0]["body"], starts[1]["body"])


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"scaled_output", "width_scaled", "scaled_input"}))
def test_initial_logits_have_the_spread_of_plain_tying(name):
    options = {"factorised": {"factor_features": 64}, "width_scaled": {}}.get(name, {})
    ids = np.arange(400)
    spreads = []
    for model in (SCHEMES[name](400, 128, bands=(0,) * 400, **options), TiedEmbedding(400, 128)):
        logits = np.array(jit(model.init_with_output)(jax.random.key(0), ids)[0])
        np.fill_diagonal(logits, np.nan)  # a row scores itself by its norm, if it is tied
        spreads.append(np.nanstd(logits))
    # The rows of S P are correlated when d < D: their products are wider by sqrt(1 + D / d).
    expected = np.sqrt(1 + 128 / 64) if name == "factorised" else 1
    assert spreads[0] / spreads[1] == pytest.approx(expected, rel=0.1)


def test_the_scale_of_the_input_is_a_knob_of_every_scheme():
    for name in ("tied", "untied", "spd_pair"):
        plain, scaled = make(name), make(name, scale_input=True)
        params = draw(plain)
        h, _ = plain.apply({"params": params}, INPUTS, method="hidden")
        h2, _ = scaled.apply({"params": params}, INPUTS, method="hidden")
        np.testing.assert_allclose(h2, 2 * h, rtol=1e-5)
    assert make("scaled_input", scale_input=True).input_scale == 2.0  # not twice


def test_the_spread_of_the_start_is_a_knob():
    for model in (TiedEmbedding(500, 40, init_std=0.3), UntiedEmbedding(500, 40, init_std=0.3)):
        for leaf in model.init(jax.random.key(0), INPUTS)["params"].values():
            assert np.std(leaf) == pytest.approx(0.3, rel=0.02)


def test_a_cap_bounds_the_logits():
    model = make("soft_cap")
    params = jax.tree.map(lambda leaf: 10 * leaf, draw(model))
    assert np.abs(model.apply({"params": params}, INPUTS)).max() <= 1.5


REFUSED = {
    "soft_cap": ("scheme.soft_cap=0", "scheme.soft_cap = 0.0 is not possible; allowed: above 0"),
    "low_rank": ("scheme.rank=0", "scheme.rank = 0 is not possible; allowed: at least 1"),
    "late_untie": (
        "scheme.untie_step=1000",
        "scheme.untie_step = 1000 is not possible; allowed: below train.steps = 1000",
    ),
    "gated_rare_rows": ("scheme.rare_band=6", "scheme.rare_band = 6 is not possible; allowed: at most 5"),
    "path_weights": (
        "scheme.lookup_weight=-1",
        "scheme.lookup_weight = -1.0 is not possible; allowed: 0 or more",
    ),
}


def test_a_band_without_rows_has_no_rare_rows(make_config):
    config = make_config("model.tying=gated_rare_rows", "scheme.rare_band=5")
    with pytest.raises(ConfigError, match=r"^scheme\.rare_band = 5 is not possible; allowed: at most 4, the last band"):
        build_model(config, [0, 1, 2, 3, 4])
    build_model(config, [0, 1, 5])


def test_the_input_is_not_scaled_twice(make_config):
    with pytest.raises(ConfigError, match=r"^model\.scale_input = True is not possible; allowed: false with "):
        build_model(make_config("model.tying=scaled_input", "model.scale_input=true"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_scheme_checks_its_own_fields(name, make_config):
    override, message = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        build_model(make_config(f"model.tying={name}", override))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("body.dropout=nan", "body.dropout = nan is not possible; allowed: a finite number, "),
        ("body.dropout=1e-50", "body.dropout = 1e-50 is not possible; allowed: what float32 holds"),
        ("body.heads=0", "body.heads = 0 is not possible; allowed: at least 1"),
        ("scheme.soft_cap=inf", "scheme.soft_cap = inf is not possible; allowed: a finite number, above 0"),
        ("scheme.gate_from_rare=1.5", "scheme.gate_from_rare = 1.5 is not possible; allowed: 0 to 1"),
        ("scheme.rank=1000000", "scheme.rank = 1000000 is not possible; allowed: at most 65,536"),
    ],
)
def test_what_no_class_would_take_is_refused_though_unused(override, message, make_config):
    with pytest.raises(ConfigError) as error:
        build_model(make_config(override))
    assert str(error.value).startswith(message)


def test_what_one_of_the_classes_takes_is_no_mistake(make_config):
    build_model(make_config("body.depth=8"))  # too many layers for an lstm
    build_model(make_config("scheme.untie_step=1000"))  # too late for this run, if it were late_untie


def test_an_option_of_no_class_is_refused(values):
    values["scheme"]["soft_cpa"] = 3.0
    with pytest.raises(ConfigError, match=r"^scheme\.soft_cpa = 3\.0 is not possible; allowed: no such field; the "):
        build_model(build_run(values))


def test_a_pair_that_would_cancel_is_refused(make_config):
    with pytest.raises(
        ConfigError, match=r"^model\.tying = 'spd_pair' is not possible; allowed: another scheme, or a "
    ):
        build_model(make_config("model.tying=spd_pair", "model.body=none"))
    build_model(make_config("model.tying=spd_pair", "model.body=mlp"))


def test_a_scheme_is_told_its_new_name(make_config):
    with pytest.raises(ConfigError, match=r"^model\.tying = 'pseudo_inverse' is not possible; allowed: spd_pair, its "):
        build_model(make_config("model.tying=pseudo_inverse", "model.body=mlp"))


def test_an_unknown_scheme_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"^model\.tying = 'shared' is not possible; allowed: tied \| untied \| "):
        build_model(make_config("model.tying=shared"))


def test_every_option_in_the_config_belongs_to_a_scheme(values):
    taken = {name for scheme in SCHEMES.values() for name in vars(scheme).get("__annotations__", {})}
    assert set(values["scheme"]) <= taken
