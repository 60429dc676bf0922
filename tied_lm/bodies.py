"""What lies between the looked-up vectors and the scored ones."""

from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tied_lm.config import Config, at_least, choose, own_options


class Body(nn.Module):
    """What the bodies share. A body takes its own fields from the config's group `body`, by name.

    A body that carries state from one batch to the next keeps it in the collection `carry`, with the batch first.
    """

    compute_dtype: DTypeLike = jnp.float32  # of the operands of products

    def __call__(self, x: Float[Array, "*N D"], *, train: bool = False) -> Float[Array, "*N D"]:
        raise NotImplementedError


class Mlp(Body):
    """Blocks with one hidden layer at each position, each added to its input: h = x + B gelu(A x)."""

    width: Annotated[int, at_least(0)] = 0  # of the hidden layers; 0 means 4 D
    depth: Annotated[int, at_least(1)] = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*N D"], *, train: bool = False) -> Float[Array, "*N D"]:
        features = x.shape[-1]
        for i in range(self.depth):
            suffix = f"_{i}" if i else ""
            width = self.width or 4 * features
            hidden = nn.gelu(nn.Dense(width, dtype=self.compute_dtype, name="up" + suffix)(x))
            x = x + nn.Dense(features, dtype=self.compute_dtype, name="down" + suffix)(hidden)
        return x


BODIES: dict[str, type[Body] | None] = {"none": None, "mlp": Mlp}


def build_body(config: Config) -> Body | None:
    """The body that a config names; None if there is none."""
    kind = choose(BODIES, "model.body", config.model.body)
    if kind is None:
        return None
    own = own_options(kind, Body, config.body, "body")
    return kind(jnp.dtype(config.model.compute_dtype), **own)
