"""The LSTM against its equations in NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen import jit
from tests.sequences import FEATURES, LENGTH, apply, apply_with_masks, influence, is_causal, new_params, normal
from tied_lm import TiedEmbedding
from tied_lm.checks import ConfigError
from tied_lm.model.bodies import Lstm
from tied_lm.model.embedding import count_parameters
from tied_lm.model.split import backward
from tied_lm.train.build import build_body


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def by_hand(body, params, x, start=None):
    """Outputs for one sequence, and (c, h) of each layer at its end, in float64."""
    params, h_LxD = jax.tree.map(np.float64, params), np.float64(x)
    ends = []
    for layer in range(body.depth):
        into, recurrent = params[f"input_{layer}"], params[f"layer_{layer}"]["recurrent"]["kernel"]
        width = recurrent.shape[0]
        c, h = start[layer] if start else (np.zeros(width), np.zeros(width))
        outputs = []
        for x_D in h_LxD:
            a = x_D @ into["kernel"] + into["bias"] + h @ recurrent
            i, f, g, o = a[:width], a[width : 2 * width], a[2 * width : 3 * width], a[3 * width :]
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            outputs.append(h)
        h_LxD = np.array(outputs)
        ends.append((c, h))
    return h_LxD @ params["projection"]["kernel"] if "projection" in params else h_LxD, ends


SHAPES = {"of width D": Lstm(), "three layers, projected": Lstm(width=5, depth=3)}


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
def test_lstm_is_that_of_its_equations(body):
    params, x = new_params(body), normal(2, LENGTH, FEATURES)
    h = apply(body, params, x)
    expected = [by_hand(body, params, one)[0] for one in x]
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(h, expected, rtol=0, atol=2e-6)
    # One sequence alone, and batches of batches.
    np.testing.assert_allclose(apply(body, params, x[1]), expected[1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(apply(body, params, x[None])[0], expected, rtol=0, atol=2e-6)


def test_lstm_is_that_of_flax():
    """The library's cell with the same numbers, which has a matrix for each gate."""
    body, x = Lstm(), normal(2, LENGTH, FEATURES)
    params = new_params(body)
    into, recurrent = params["input_0"], params["layer_0"]["recurrent"]["kernel"]
    cell = {}
    for k, gate in enumerate("ifgo"):
        part = np.s_[..., k * FEATURES : (k + 1) * FEATURES]
        cell["i" + gate] = {"kernel": into["kernel"][part]}
        cell["h" + gate] = {"kernel": recurrent[part], "bias": into["bias"][part]}
    expected = apply(nn.RNN(nn.LSTMCell(FEATURES)), {"cell": cell}, x)
    np.testing.assert_allclose(apply(body, params, x), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
def test_lstm_is_causal(body):
    assert is_causal(influence(body, new_params(body)))


def test_the_start_of_an_lstm():
    body = Lstm(width=32, depth=2)
    params = jit(body.init)(jax.random.key(0), jnp.zeros((1, 1, 512)))["params"]
    assert np.std(params["input_0"]["kernel"]) == pytest.approx(512**-0.5, rel=0.02)
    assert np.std(params["input_1"]["kernel"]) == pytest.approx(32**-0.5, rel=0.05)
    for layer in range(2):
        np.testing.assert_array_equal(params[f"input_{layer}"]["bias"], np.repeat([0, 1, 0, 0], 32))
        for gate in np.split(np.asarray(params[f"layer_{layer}"]["recurrent"]["kernel"]), 4, axis=1):
            np.testing.assert_allclose(gate @ gate.T, np.eye(32), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("width", "depth"), [(0, 1), (0, 3), (5, 2)])
def test_parameters_of_an_lstm(width, depth):
    d, h = FEATURES, width or FEATURES
    expected = 4 * h * (d + h + 1) + (depth - 1) * 4 * h * (2 * h + 1) + (h * d if h != d else 0)
    assert count_parameters(TiedEmbedding(11, d, Lstm(width=width, depth=depth)))["body"] == expected


def test_dropout_of_an_lstm_leaves_the_recurrence_alone():
    """Written out with the masks that were drawn: of each layer's input and of the last output, and no others."""
    body, x = Lstm(width=5, depth=2, dropout=0.4), normal(1, LENGTH, FEATURES)
    params = new_params(body)
    h, masks = apply_with_masks(body, params, x)
    assert [mask.shape[2] for mask in masks] == [FEATURES, 5, 5]
    layers = [{"input_0": params[f"input_{i}"], "layer_0": params[f"layer_{i}"]} for i in range(2)]
    first = by_hand(Lstm(), layers[0], x[0] * masks[0][0])[0]
    second = by_hand(Lstm(), layers[1], first * masks[1][0])[0]
    expected = (second * masks[2][0]) @ np.float64(params["projection"]["kernel"])
    np.testing.assert_allclose(h[0], expected, rtol=0, atol=2e-6)


def test_an_lstm_drops_at_the_rate_and_in_training_only():
    body, x = Lstm(dropout=0.3), normal(4, 250, FEATURES)
    params = new_params(Lstm())
    train = jit(lambda key: body.apply({"params": params}, x, train=True, rngs={"dropout": key}))
    h, again, other = (train(jax.random.key(k)) for k in (0, 0, 1))
    # The last layer's output is 0 where it was dropped, and nowhere else.
    assert np.mean(np.equal(h, 0)) == pytest.approx(0.3, abs=0.02)
    np.testing.assert_array_equal(h, again)
    assert np.mean(np.equal(h, 0) == np.equal(other, 0)) < 0.7
    np.testing.assert_array_equal(apply(body, params, x), apply(Lstm(), params, x))


def test_an_lstm_in_bfloat16_keeps_parameters_and_state_in_float32():
    body = Lstm(jnp.bfloat16, width=5, depth=2, stateful=True)
    params, x = new_params(body), normal(2, LENGTH, FEATURES)
    h, changed = apply(body, params, x, mutable=["carry"])
    assert {leaf.dtype for leaf in jax.tree.leaves((params, changed, h))} == {jnp.dtype(jnp.float32)}
    exact = apply(Lstm(width=5, depth=2), params, x)
    assert 0 < np.abs(h - exact).max() < 0.02 * np.abs(exact).max()


STATEFUL = Lstm(width=5, depth=2, stateful=True)


def test_a_stateful_lstm_in_pieces_is_one_over_the_whole():
    params, x = new_params(STATEFUL), normal(2, LENGTH, FEATURES)
    pieces, carry = [], {}
    for piece in np.split(x, [1, 3], axis=1):
        h, carry = apply(STATEFUL, params, piece, carry, mutable=["carry"])
        pieces.append(h)
    whole, end = apply(STATEFUL, params, x, mutable=["carry"])
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=0, atol=1e-6)
    for batch, one in enumerate(x):
        expected, ends = by_hand(STATEFUL, params, one)
        np.testing.assert_allclose(whole[batch], expected, rtol=0, atol=2e-6)
        for layer in range(2):
            for state in (carry, end):
                found = [part[batch] for part in state["carry"][f"layer_{layer}"]]
                np.testing.assert_allclose(found, ends[layer], rtol=0, atol=2e-6)
    # It is read where it is not written.
    last = apply(STATEFUL, params, x[:, :1], end)
    assert np.abs(last - whole[:, :1]).max() > 0.01


def test_a_stateful_lstm_starts_from_zeros():
    start = jit(STATEFUL.init)(jax.random.key(0), normal(3, LENGTH, FEATURES))["carry"]
    assert [leaf.shape for leaf in jax.tree.leaves(start)] == [(3, 5)] * 4
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(start))
    assert "carry" not in jax.eval_shape(Lstm().init, jax.random.key(0), normal(3, LENGTH, FEATURES))


def test_gradients_of_a_piece_stop_at_its_start():
    """They are those of the loss of the piece with the state it was given as a constant."""
    model = TiedEmbedding(11, FEATURES, STATEFUL)
    params = {"embedding": normal(11, FEATURES), "body": new_params(STATEFUL)}
    ids = np.random.default_rng(2).integers(0, 11, (2, 9))
    split = jit(functools.partial(backward, model))
    first = split(params, ids[:, :4], ids[:, 1:5])
    second = split(params, ids[:, 4:8], ids[:, 5:], carry=first.carry)

    def loss(params):
        variables = {"params": params, "carry": first.carry}
        logits, _ = model.apply(variables, ids[:, 4:8], mutable=["carry"])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 5:, None], axis=-1).mean()

    expected, gradients = jit(jax.value_and_grad(loss))(params)
    assert float(second.loss) == pytest.approx(float(expected), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), second.gradients, gradients)
    assert abs(float(second.loss) - float(split(params, ids[:, 4:8], ids[:, 5:]).loss)) > 1e-3


def test_an_lstm_by_name(make_config):
    overrides = ("model.body=lstm", "body.depth=3", "body.width=7", "body.dropout=0.5")
    assert build_body(make_config(*overrides)) == Lstm(jnp.dtype("float32"), 7, 3, 0.5, False)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("depth", "0", r"1 \| 2 \| 3"),
        ("depth", "4", r"1 \| 2 \| 3"),
        ("width", "-1", "at least 0"),
        ("dropout", "1.0", r"0 or more, below 1 \(as float32\)"),
        ("dropout", "-0.1", r"0 or more, below 1 \(as float32\)"),
    ],
)
def test_options_of_an_lstm(make_config, field, value, allowed):
    with pytest.raises(ConfigError, match=rf"^body\.{field} = {value} is not possible; allowed: {allowed}$"):
        build_body(make_config("model.body=lstm", f"body.{field}={value}"))


def test_a_stateful_lstm_wants_contiguous_text(make_config):
    fields = ("model.body=lstm", "body.stateful=true")
    with pytest.raises(
        ConfigError, match=r"^body\.stateful = True is not .*: false, unless data.order = 'contiguous'$"
    ):
        build_body(make_config(*fields))
    assert build_body(make_config(*fields, "data.source=text", "data.order=contiguous")).stateful
