"""What is asked of every body that looks at sequences."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen import jit

LENGTH, FEATURES = 6, 8


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def new_params(body):
    """Parameters drawn anew, all of them far from 0: biases and scales too."""
    params = jit(body.init)(jax.random.key(0), jnp.zeros((1, 1, FEATURES)))["params"]
    leaves, tree = jax.tree.flatten(jax.device_get(params))
    return tree.unflatten([leaf + 0.3 * normal(*leaf.shape, seed=i) for i, leaf in enumerate(leaves)])


def apply(body, params, x, carry=None, **options):
    """The body's outputs, compiled."""
    return jit(functools.partial(body.apply, **options))({"params": params} | (carry or {}), x)


def apply_with_masks(body, params, x):
    """The body's outputs in training, and the factors of dropout in the order in which they were drawn."""
    masks = []

    def draw(dropout, x):
        if dropout.deterministic:
            return x
        keep = 1 - dropout.rate
        masks.append(jax.random.bernoulli(dropout.make_rng("dropout"), keep, x.shape) / keep)
        return x * masks[-1]

    def train(x):
        return body.apply({"params": params}, x, train=True, rngs={"dropout": jax.random.key(1)}), masks

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.Dropout, "__call__", draw)
        h, drawn = jit(train)(x)
    return h, [np.float64(mask) for mask in drawn]


def influence(body, params):
    """The largest |d h[t] / d x[s]| for each t and s."""
    jacobian = jit(jax.jacrev(lambda x: body.apply({"params": params}, x)))(normal(LENGTH, FEATURES))
    return np.abs(jacobian).max(axis=(1, 3))


def is_causal(influence_LxL):
    """Whether each position depends on itself and on every earlier one, and on no later one in any bit."""
    return np.array_equal(influence_LxL > 0, np.tril(np.ones_like(influence_LxL, bool)))
