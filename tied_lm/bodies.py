"""What lies between the looked-up vectors and the scored ones."""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Float


class Mlp(nn.Module):
    """One hidden layer of width 4 D at each position, added to its input: h = x + B gelu(A x)."""

    @nn.compact
    def __call__(self, x: Float[Array, "*N D"], *, train: bool = False) -> Float[Array, "*N D"]:
        features = x.shape[-1]
        hidden = nn.gelu(nn.Dense(4 * features, name="up")(x))
        return x + nn.Dense(features, name="down")(hidden)


BODIES: dict[str, Callable[[], nn.Module | None]] = {"none": lambda: None, "mlp": Mlp}
