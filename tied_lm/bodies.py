"""What lies between the looked-up vectors and the scored ones."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Mlp(nn.Module):
    """One hidden layer of width 4 D at each position, added to its input: h = x + B gelu(A x)."""

    compute_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*N D"], *, train: bool = False) -> Float[Array, "*N D"]:
        features = x.shape[-1]
        hidden = nn.gelu(nn.Dense(4 * features, dtype=self.compute_dtype, name="up")(x))
        return x + nn.Dense(features, dtype=self.compute_dtype, name="down")(hidden)


BODIES: dict[str, Callable[[DTypeLike], nn.Module | None]] = {"none": lambda _: None, "mlp": Mlp}
