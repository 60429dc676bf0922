"""A small Linen model that is not this project's, and its split."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tied_lm import split_embed_gradients
from tied_lm.model.bodies import Mlp

V, D = 11, 6
TABLE = "token_embed/embedding"
IDS = np.array([[1, 2, 1, 0, 5], [3, 3, 9, 2, 1]], np.int32)
TARGETS = np.array([[2, 1, 0, 5, 3], [3, 9, 2, 1, 7]], np.int32)


# Compiled in a hurry, since each program runs once. Newer versions of XLA no longer have the last option.
HURRY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):
    HURRY["xla_cpu_use_fusion_emitters"] = False
jit = functools.partial(jax.jit, compiler_options=HURRY)


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS).mean()


def init(model, *inputs, key=0):
    inputs = inputs or (IDS,)
    keys = {"params": jax.random.key(key), "dropout": jax.random.key(1)}
    variables = jit(model.init)(keys, *inputs)
    # Larger than usual, so that no part is small beside the others.
    larger = {
        "params": jax.tree.map(lambda x: x + 0.3 * np.cos(np.arange(x.size)).reshape(x.shape), variables["params"])
    }
    return variables | jax.tree.map(lambda x: x.astype(jnp.float32), larger)


def split(loss_fn, params, **kwargs):
    return jit(lambda params: split_embed_gradients(loss_fn, params, **{"table": TABLE} | kwargs))(params)


def assert_close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)


def assert_adds_up(found, loss_fn, params, table=TABLE, atol=1e-6):
    """The parts are autodiff's gradient together, and none of lookup and scoring is small."""
    gradient = jit(jax.grad(loss_fn))(params)
    for name in table.split("/"):
        gradient = gradient[name]
    (gradient,) = jax.tree.leaves(gradient)
    assert_close(found.total, gradient, atol)
    assert_close(found.lookup + found.scoring + found.other, gradient, atol)
    assert np.abs(found.lookup).max() > 1e-2
    assert np.abs(found.scoring).max() > 1e-2


class Tied(nn.Module):
    """`TiedEmbedding` with `nn.Embed`."""

    body: nn.Module | None = None

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(V, D, name="token_embed")
        x = embed(ids)
        return embed.attend(x if self.body is None else self.body(x))


SMALL = Tied(Mlp())
