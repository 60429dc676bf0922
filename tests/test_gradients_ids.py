"""Ids outside the vocabulary: refused where they count, ignored where they are masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tied_lm import TiedEmbedding, loss_and_gradients, row_stats, split_gradients


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
