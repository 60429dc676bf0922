"""What the bodies compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tied_lm import TiedEmbedding
from tied_lm.checks import ConfigError
from tied_lm.model.bodies import Mlp
from tied_lm.train.build import build_body

D = 6


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal((2, 3, D)).astype(np.float32)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(1)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "up": {"kernel": normal(D, 4 * D), "bias": normal(4 * D)},
        "down": {"kernel": normal(4 * D, D), "bias": normal(D)},
    }


def test_mlp_is_a_residual_around_one_hidden_layer(x, params):
    a = x.astype(np.float64) @ params["up"]["kernel"] + params["up"]["bias"]
    hidden = a / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
    expected = x + hidden @ params["down"]["kernel"] + params["down"]["bias"]
    np.testing.assert_allclose(Mlp().apply({"params": params}, x, train=True), expected, rtol=1e-5, atol=1e-5)


def test_mlp_passes_its_input_on_when_its_last_layer_is_zero(x, params):
    off = params | {"down": jax.tree.map(np.zeros_like, params["down"])}
    np.testing.assert_array_equal(Mlp().apply({"params": off}, x), x)


def test_mlp_sees_one_position_at_a_time(x, params):
    order = np.array([2, 0, 1])
    h = np.asarray(Mlp().apply({"params": params}, x))
    np.testing.assert_allclose(Mlp().apply({"params": params}, x[:, order]), h[:, order], rtol=1e-6)


def test_mlp_shapes_follow_its_input():
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(Mlp().init, jax.random.key(0), np.zeros((1, D))))
    assert shapes == {
        "params": {
            "up": {"kernel": (D, 4 * D), "bias": (4 * D,)},
            "down": {"kernel": (4 * D, D), "bias": (D,)},
        }
    }


def test_bodies_by_name(make_config):
    assert build_body(make_config("model.body=none")) is None
    overrides = ("model.body=mlp", "model.compute_dtype=bfloat16", "body.depth=2", "body.width=7")
    assert build_body(make_config(*overrides)) == Mlp(jnp.dtype("bfloat16"), 7, 2)


def test_a_body_checks_its_own_fields(make_config):
    with pytest.raises(ConfigError, match=r"^body\.depth = 0 is not possible; allowed: at least 1$"):
        build_body(make_config("model.body=mlp", "body.depth=0"))


def test_blocks_of_an_mlp_follow_each_other(x):
    model = Mlp(depth=2)
    params = model.init(jax.random.key(1), x)["params"]
    second = {name.removesuffix("_1"): params[name] for name in ("up_1", "down_1")}
    once = Mlp().apply({"params": {name: params[name] for name in ("up", "down")}}, x)
    np.testing.assert_allclose(model.apply({"params": params}, x), Mlp().apply({"params": second}, once), rtol=1e-6)


def test_mlp_in_bfloat16_keeps_its_parameters_and_its_input_in_float32(x, params):
    h = Mlp(compute_dtype=jnp.bfloat16).apply({"params": params}, x)
    exact = Mlp().apply({"params": params}, x)
    assert h.dtype == exact.dtype == jnp.float32
    assert 0 < np.abs(h - exact).max() < 0.02 * np.abs(exact).max()
    shapes = jax.eval_shape(Mlp(compute_dtype=jnp.bfloat16).init, jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}


def test_hidden_vectors_are_those_of_the_body(x, params):
    matrix = x.reshape(-1, D)
    variables = {"params": {"embedding": matrix, "body": params}}
    ids = np.arange(6).reshape(2, 3)
    h, scoring = TiedEmbedding(6, D, Mlp()).apply(variables, ids, method="hidden")
    np.testing.assert_array_equal(h, Mlp().apply({"params": params}, x))
    assert np.abs(h - x).max() > 0.1
    np.testing.assert_array_equal(scoring, matrix)
    plain, _ = TiedEmbedding(6, D).apply({"params": {"embedding": matrix}}, ids, method="hidden")
    np.testing.assert_array_equal(plain, x)
