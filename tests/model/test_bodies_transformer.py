"""The Transformer against its equations in NumPy, with complex numbers for the rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen import jit
from tests.sequences import FEATURES, LENGTH, apply, apply_with_masks, influence, is_causal, new_params, normal
from tied_lm import TiedEmbedding
from tied_lm.checks import ConfigError
from tied_lm.model.bodies import Transformer, rotate
from tied_lm.model.embedding import count_parameters
from tied_lm.train.build import build_body


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale["scale"]


def gelu(a):
    return a / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))


def turned(x_LxK):
    """The pairs (x[k], x[k + K/2]) as complex numbers, each turned by its position times its frequency."""
    half = x_LxK.shape[-1] // 2
    frequency = 10_000.0 ** -(np.arange(half) / half)
    pairs = x_LxK[:, :half] + 1j * x_LxK[:, half:]
    return pairs * np.exp(1j * np.arange(len(x_LxK))[:, None] * frequency)


def attention(q_LxK, k_LxK, v_LxK):
    """Scores are real parts of products with the conjugate: the scalar products of the pairs."""
    scores = np.real(turned(q_LxK) @ turned(k_LxK).conj().T) / np.sqrt(q_LxK.shape[1])
    weights = np.tril(np.exp(scores - scores.max(axis=1, keepdims=True)))
    return weights / weights.sum(axis=1, keepdims=True) @ v_LxK


def by_hand(body, params, x, masks=None):
    """Outputs for one sequence, in float64. `masks` are those of dropout: of the input and of what each layer adds."""
    params, h = jax.tree.map(np.float64, params), np.float64(x)
    first, *masks = [1.0] * (1 + 2 * body.depth) if masks is None else masks
    h = h * first
    for i in range(body.depth):
        block = params[f"block_{i}"]
        normed = norm(h, block["attention_norm"])
        q, k, v = (np.split(normed @ block[n]["kernel"], body.heads, axis=1) for n in ("query", "key", "value"))
        attended = [attention(*of_head) for of_head in zip(q, k, v, strict=True)]
        h = h + np.concatenate(attended, axis=1) @ block["out"]["kernel"] * masks[2 * i]
        hidden = gelu(norm(h, block["feed_forward_norm"]) @ block["up"]["kernel"])
        h = h + hidden @ block["down"]["kernel"] * masks[2 * i + 1]
    return norm(h, params["norm"])


BODY = Transformer(width=12, depth=2, heads=2)


@pytest.fixture(scope="module")
def params():
    return new_params(BODY)


@pytest.fixture(scope="module")
def x():
    return normal(2, LENGTH, FEATURES)


def test_transformer_is_that_of_its_equations(params, x):
    expected = [by_hand(BODY, params, one) for one in x]
    np.testing.assert_allclose(apply(BODY, params, x), expected, rtol=0, atol=5e-6)
    # One sequence alone, and batches of batches.
    np.testing.assert_allclose(apply(BODY, params, x[1]), expected[1], rtol=0, atol=5e-6)
    np.testing.assert_allclose(apply(BODY, params, x[None])[0], expected, rtol=0, atol=5e-6)


def test_transformer_is_causal(params, monkeypatch):
    assert is_causal(influence(BODY, params))
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, is_causal: attend(*a, is_causal=False))
    assert not is_causal(influence(BODY, params))


def test_scores_of_rotated_vectors_depend_on_distances_alone():
    q, k = (np.tile(normal(1, 1, 1, 10, seed=seed), (1, 50, 1, 1)) for seed in (0, 1))
    scores = np.asarray(rotate(q))[0, :, 0] @ np.asarray(rotate(k))[0, :, 0].T
    frequency = 10_000.0 ** -(np.arange(5) / 5)
    q, k = (np.float64(a[0, 0, 0, :5]) + 1j * a[0, 0, 0, 5:] for a in (q, k))
    distance = np.subtract.outer(np.arange(50), np.arange(50))
    expected = np.real(np.exp(1j * distance[..., None] * frequency) @ (q * k.conj()))
    assert expected[:, 0].std() > 0.5
    np.testing.assert_allclose(scores, expected, rtol=0, atol=5e-5)


def test_the_start_of_a_transformer_is_a_norm_of_its_input(x):
    body = Transformer(depth=2, heads=2)
    params = jit(body.init)(jax.random.key(0), x)["params"]
    np.testing.assert_allclose(apply(body, params, x), norm(np.float64(x), {"scale": 1}), rtol=0, atol=1e-6)
    wide = jit(Transformer(heads=2).init)(jax.random.key(0), normal(1, 1, 512))["params"]["block_0"]
    for name in ("query", "key", "value", "up"):
        assert np.std(wide[name]["kernel"]) == pytest.approx(512**-0.5, rel=0.02), name


@pytest.mark.parametrize(("width", "depth", "heads"), [(0, 1, 1), (0, 3, 2), (5, 2, 4)])
def test_parameters_of_a_transformer(width, depth, heads):
    d = FEATURES
    expected = depth * (4 * d * d + 2 * d * (width or 4 * d) + 2 * d) + d
    model = TiedEmbedding(11, d, Transformer(width=width, depth=depth, heads=heads))
    assert count_parameters(model)["body"] == expected


def test_rematerialisation_changes_no_value_and_no_gradient(params, x):
    def gradients(remat):
        body = Transformer(width=12, depth=2, heads=2, dropout=0.2, remat=remat)

        def cubes(params):
            h = body.apply({"params": params}, x, train=True, rngs={"dropout": jax.random.key(1)})
            return jnp.sum(h**3), h

        return jit(jax.grad(cubes, has_aux=True))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max()),
        gradients(False),
        gradients(True),
    )


def test_rematerialisation_keeps_less_for_the_backward_pass():
    def kept(remat):
        body, x = Transformer(depth=4, remat=remat), jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
        params = jax.eval_shape(body.init, jax.random.key(0), x)["params"]
        _, pullback = jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: body.apply({"params": p}, x), p, x), params, x)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert kept(True) < kept(False) / 3


def test_dropout_of_a_transformer_is_on_the_input_and_on_each_branch(params, x):
    """Written out with the masks that were drawn."""
    body = Transformer(width=12, depth=2, heads=2, dropout=0.4)
    h, masks = apply_with_masks(body, params, x)
    assert [mask.shape for mask in masks] == [x.shape] * 5
    expected = [by_hand(body, params, one, [mask[i] for mask in masks]) for i, one in enumerate(x)]
    np.testing.assert_allclose(h, expected, rtol=0, atol=5e-6)


def test_a_transformer_drops_at_the_rate_and_in_training_only(params):
    body, x = Transformer(dropout=0.3), normal(4, 250, FEATURES)
    # Without a block that adds anything, the output is 0 where the input was dropped.
    plain = jit(body.init)(jax.random.key(0), x)["params"]
    train = jit(lambda key: body.apply({"params": plain}, x, train=True, rngs={"dropout": key}))
    h, again, other = (train(jax.random.key(k)) for k in (0, 0, 1))
    assert np.mean(np.equal(h, 0)) == pytest.approx(0.3, abs=0.02)
    np.testing.assert_array_equal(h, again)
    assert np.mean(np.equal(h, 0) == np.equal(other, 0)) < 0.7
    evaluated = apply(Transformer(width=12, depth=2, heads=2, dropout=0.3), params, x)
    np.testing.assert_array_equal(evaluated, apply(BODY, params, x))


def test_a_transformer_in_bfloat16_keeps_parameters_stream_and_norms_in_float32(params, x):
    body = Transformer(jnp.bfloat16, width=12, depth=2, heads=2)
    h, exact = apply(body, params, x), apply(BODY, params, x)
    shapes = jax.eval_shape(body.init, jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves((shapes, h))} == {jnp.dtype(jnp.float32)}
    assert 1e-4 < np.abs(h - exact).max() < 0.05 * np.abs(exact).max()
    # With branches that add nothing, nothing is rounded.
    plain = jit(body.init)(jax.random.key(0), x)["params"]
    np.testing.assert_array_equal(apply(body, plain, x), apply(BODY, plain, x))


def test_a_transformer_by_name(make_config):
    overrides = ("model.body=transformer", "body.depth=3", "body.width=7", "body.dropout=0.5", "body.remat=true")
    assert build_body(make_config(*overrides)) == Transformer(jnp.dtype("float32"), 7, 3, 4, 0.5, True)


@pytest.mark.parametrize(
    ("features", "field", "value", "allowed"),
    [
        (32, "heads", 3, r"1 \| 2 \| 4 \| 8 \| 16, parts of even width of model\.features = 32"),
        (32, "heads", 32, r"1 \| 2 \| 4 \| 8 \| 16, parts of even width of model\.features = 32"),
        (6, "heads", 2, r"1 \| 3, parts of even width of model\.features = 6"),
        (5, "heads", 1, r"none, parts of even width of model\.features = 5"),
        (32, "heads", 0, "at least 1"),
        (32, "depth", 0, "at least 1"),
        (32, "width", -1, "at least 0"),
        (32, "dropout", 1.0, r"0 or more, below 1 \(as float32\)"),
    ],
)
def test_options_of_a_transformer(make_config, features, field, value, allowed):
    config = make_config("model.body=transformer", f"model.features={features}", f"body.{field}={value}")
    with pytest.raises(ConfigError, match=rf"^body\.{field} = {value} is not possible; allowed: {allowed}$"):
        build_body(config)
