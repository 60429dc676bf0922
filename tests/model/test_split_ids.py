"""What the functions take for ids, targets and masks: the rest is refused in words."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tied_lm import (
    TiedEmbedding,
    UntiedEmbedding,
    loss_and_gradients,
    row_stats,
    split_gradients,
    split_table_gradients,
)
from tied_lm.model import bodies, schemes


@pytest.mark.parametrize("function", [split_gradients, row_stats, loss_and_gradients])
@pytest.mark.parametrize(
    ("inputs", "targets", "words"), [([0, 9], [0, 1], "inputs has 9"), ([0, 1], [-1, 1], "targets has -1")]
)
def test_ids_outside_the_vocabulary_are_refused(function, inputs, targets, words):
    params = {"embedding": jnp.ones((9, 2))}
    with pytest.raises(ValueError, match=words):
        function(TiedEmbedding(9, 2), params, jnp.array(inputs), jnp.array(targets))


@pytest.mark.parametrize("vocab_size", [3, 40])  # fewer and more rows than tokens
@pytest.mark.parametrize("padding", [-1, -100, 10**6])
def test_a_masked_target_may_be_any_number(vocab_size, padding):
    model = TiedEmbedding(vocab_size, 2)
    params = model.init(jax.random.key(0), jnp.array([0]))["params"]
    inputs, mask = jnp.array([0, 2, 1, 0]), jnp.array([True, False, True, True])
    found, expected = (
        loss_and_gradients(model, params, inputs, jnp.array([1, target, 2, 2]), mask=mask, rows=True)
        for target in (padding, 0)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


FUNCTIONS = [split_gradients, row_stats, loss_and_gradients]
MODEL, PARAMS = TiedEmbedding(9, 2), {"embedding": np.linspace(-1, 1, 18, dtype=np.float32).reshape(9, 2)}
REFUSED = {
    "inputs has shape (3,) and targets (2,)": ([0, 1, 2], [0, 1]),
    "inputs has shape (2,) and targets (1, 2)": ([0, 1], [[0, 1]]),
    "inputs has shape (2, 2) and targets (4,)": ([[0, 1], [2, 3]], [0, 1, 2, 3]),
    "inputs is empty": ([], []),
    "targets is empty": ([0], np.zeros((0, 3), int)),
    "inputs is of float64, not an array of integers": ([0.0, 1.0], [0, 1]),
    "targets is of float32, not an array of integers": ([0, 1], np.ones(2, np.float32)),
    "inputs is of bool": ([True], [0]),
    "inputs is of <U3": ("one", [0]),
    "targets is of object": ([0], [None]),
    "inputs is not an array of integers": ([[0], [1, 2]], [0, 1, 2]),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.untyped
def test_ids_and_targets_that_do_not_fit(function, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        function(MODEL, PARAMS, *REFUSED[words])


@pytest.mark.parametrize("words", ["inputs has shape (3,) and targets (2,)", "targets is of float32"])
@pytest.mark.untyped
def test_shapes_and_types_are_seen_under_jit(words):
    inputs, targets = next(map(np.asarray, pair) for text, pair in REFUSED.items() if text.startswith(words))
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        jax.jit(split_gradients, static_argnums=0)(MODEL, PARAMS, inputs, targets)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([True], "mask has shape (1,), and the targets (2,)"),
        ([[True, False]], "mask has shape (1, 2), and the targets (2,)"),
        ([0.5, 1.0], "mask is of float64, not an array of booleans"),
        ([], "mask is empty"),
    ],
)
@pytest.mark.untyped
def test_masks_that_do_not_fit(mask, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        loss_and_gradients(MODEL, PARAMS, [0, 1], [1, 2], mask=mask)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.untyped
def test_lists_and_integers_of_any_width_are_taken(function):
    ids = [[0, 8], [3, 0]], [[8, 1], [1, 2]]
    expected = function(MODEL, PARAMS, *map(jnp.array, ids))
    for kind in (list, np.uint16, np.int64, jnp.int8):
        jax.tree.map(np.testing.assert_array_equal, function(MODEL, PARAMS, *map(kind, ids)), expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TiedEmbedding(0, 3), "vocab_size = 0 is not possible; allowed: at least 1"),
        (lambda: UntiedEmbedding(3, features=0), "features = 0 is not possible; allowed: at least 1"),
        (lambda: TiedEmbedding(3, 2.5), "features = 2.5 is not possible; allowed: an integer, at least 1"),
        (lambda: TiedEmbedding(True, 2), "vocab_size = True is not possible; allowed: an integer, at least 1"),
        (lambda: schemes.Factorised(3, 2, factor_features=0), "factor_features = 0 is not possible"),
        (lambda: schemes.SoftCap(3, 2, soft_cap=0.0), "soft_cap = 0.0 is not possible; allowed: above 0"),
        (lambda: bodies.Mlp(depth=0), "depth = 0 is not possible; allowed: at least 1"),
        (lambda: bodies.Transformer(heads=-1), "heads = -1 is not possible; allowed: at least 1"),
    ],
)
@pytest.mark.untyped
def test_sizes_of_modules(make, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        make()


@pytest.mark.untyped
def test_numbers_of_numpy_are_sizes():
    assert TiedEmbedding(np.int64(3), np.int32(2)).init(jax.random.key(0), jnp.array([0]))["params"]["embedding"].size


TABLE = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (([[1.0, 2.0]],), "lookup_table is a list, not an array (V, D) of floats"),
        ((TABLE.astype(int),), "lookup_table is an array (3, 2) of int64, not (V, D) of floats"),
        ((TABLE[0],), "lookup_table is an array (2,) of float32, not (V, D) of floats"),
        ((TABLE[:0],), "lookup_table is an array (0, 2) of float32, not (V, D) of floats"),
        ((TABLE, TABLE[:1]), "lookup_table is (3, 2) and scoring_table (1, 2): not equal"),
    ],
)
@pytest.mark.untyped
def test_tables_that_do_not_fit(tables, words):
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        split_table_gradients(lambda lookup, scoring: lookup.sum() + scoring.sum(), *tables)
