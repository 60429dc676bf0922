"""What lies between the looked-up vectors and the scored ones."""

from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tied_lm.checks import Allowed, ConfigError, at_least, at_most, below_one, check_fields, wide


class Body(nn.Module):
    """What the bodies share. A body is called as `body(x, train=...)` and gives h of the shape of x, (..., D). It takes
    its own fields from the config's group `body`, by name.

    A body that carries state from one batch to the next keeps it in the collection `carry`, with the batch first.
    One that looks at whole sequences takes the last axis but one for the positions; what comes before is the batch.
    """

    compute_dtype: DTypeLike = jnp.float32  # of the operands of products

    default_width: ClassVar[int] = 4  # what `width = 0` means, in units of D

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()

    def check(self, features: int) -> None:
        """Refuse fields that do not go together, or not with the width D.

        Raises:
            ConfigError: it names the field as the config does.
        """


def by_token(layer: nn.Dense, x: Float[Array, "*N D"]) -> Float[Array, "*N E"]:
    """What a layer makes of tokens, which it is given along one axis: if they have several, XLA:CPU makes a transposed
    copy of what is summed over them for the kernel's gradient, and fuses all that is elementwise before it into it."""
    return layer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], layer.features)


class Mlp(Body):
    """Blocks with one hidden layer at each position, each added to its input: h = x + B gelu(A x)."""

    width: Annotated[int, at_least(0), wide] = 0  # of the hidden layers; 0 means 4 D
    depth: Annotated[int, at_least(1), at_most(256)] = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*N D"], *, train: bool = False) -> Float[Array, "*N D"]:
        features = x.shape[-1]
        for i in range(self.depth):
            suffix = f"_{i}" if i else ""
            width = self.width or self.default_width * features
            hidden = nn.gelu(by_token(nn.Dense(width, dtype=self.compute_dtype, name="up" + suffix), x))
            x = x + by_token(nn.Dense(features, dtype=self.compute_dtype, name="down" + suffix), hidden)
        return x


def _orthogonal_gates(key: Array, shape: tuple[int, int], dtype: DTypeLike) -> Float[Array, "H G"]:
    """An orthogonal matrix for each of the four gates, side by side."""
    one = nn.initializers.orthogonal()
    return jnp.concatenate([one(k, (shape[0], shape[0]), dtype) for k in jax.random.split(key, 4)], axis=1)


def _forget_bias(key: Array, shape: tuple[int], dtype: DTypeLike) -> Float[Array, "G"]:
    """1 for the forget gate, 0 for the others."""
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


class LstmCell(nn.RNNCellBase):
    """One step of an LSTM, given the inputs' part of the gates: c' = f c + i g, h' = o tanh(c').

    The gates i, f, o are sigmoids and g a tanh of the four quarters of a = A x + b + R h. The carry is (c, h), float32.
    (In Flax's own cells the biases of all gates start alike.)
    """

    features: int
    compute_dtype: DTypeLike

    @nn.compact
    def __call__(
        self, carry: tuple[Float[Array, "B H"], Float[Array, "B H"]], inputs: Float[Array, "B G"]
    ) -> tuple[tuple[Float[Array, "B H"], Float[Array, "B H"]], Float[Array, "B H"]]:
        c, h = carry
        recurrent = nn.Dense(
            4 * self.features, False, self.compute_dtype, kernel_init=_orthogonal_gates, name="recurrent"
        )
        i, f, g, o = jnp.split(inputs + recurrent(h), 4, axis=-1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * nn.tanh(g)
        h = nn.sigmoid(o) * nn.tanh(c)
        return (c, h), h

    @property
    def num_feature_axes(self) -> int:
        return 1


class Lstm(Body):
    """LSTM layers, with dropout where nothing recurs (Zaremba et al. 2014, arXiv 1409.2329): on the input of every
    layer and on the output of the last. If `width` is not D, a projection without bias leads back to D.

    At the start: kernels from a truncated normal of variance 1 / fan-in, recurrent ones orthogonal for each gate,
    biases 0 but for 1 at the forget gate (Jozefowicz et al. 2015).
    """

    width: Annotated[int, at_least(0), wide] = 0  # H, units of each layer; 0 means D
    depth: Annotated[int, Allowed("1 | 2 | 3", lambda x: 1 <= x <= 3)] = 1
    dropout: Annotated[float, below_one] = 0.0
    stateful: bool = False  # carry (c, h) of each layer from batch to batch, else start each sequence from zeros

    default_width: ClassVar[int] = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*N D"], *, train: bool = False) -> Float[Array, "*N D"]:
        features, width = x.shape[-1], self.width or self.default_width * x.shape[-1]
        h = x.reshape(-1, *x.shape[-2:])
        zeros = jnp.zeros((h.shape[0], width))
        for i in range(self.depth):
            name = f"layer_{i}"
            start = self.get_variable("carry", name, (zeros, zeros)) if self.stateful else (zeros, zeros)
            h = nn.Dropout(self.dropout, deterministic=not train)(h)
            inputs = nn.Dense(4 * width, dtype=self.compute_dtype, bias_init=_forget_bias, name=f"input_{i}")
            gates = by_token(inputs, h)
            layer = nn.RNN(LstmCell(width, self.compute_dtype, name=name), return_carry=True)
            end, h = layer(gates.astype(jnp.float32), initial_carry=start)
            if self.stateful and self.is_mutable_collection("carry"):
                self.put_variable("carry", name, start if self.is_initializing() else end)
        h = nn.Dropout(self.dropout, deterministic=not train)(h)
        if width != features:
            h = by_token(nn.Dense(features, False, self.compute_dtype, name="projection"), h).astype(jnp.float32)
        return h.reshape(x.shape)


def rotate(x_BxLxHxK: Float[Array, "B L H K"]) -> Float[Array, "B L H K"]:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864), the products of which depend on distances alone.

    At position p the pair (x[k], x[k + K/2]), as a complex number, is multiplied by exp(i p 10000^(-2k / K)).
    """
    length, width = x_BxLxHxK.shape[1], x_BxLxHxK.shape[3]
    angle = jnp.arange(length)[:, None, None] * 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    real, imaginary = jnp.split(x_BxLxHxK, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); products in `compute_dtype`, all else in float32."""

    heads: int
    width: int
    dropout: float  # 0 outside training
    compute_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        features = x.shape[-1]
        zeros, lecun = nn.initializers.zeros, nn.initializers.lecun_normal()

        def dense(x: Float[Array, "B L D"], width: int, name: str, start: nn.initializers.Initializer) -> Array:
            return by_token(nn.Dense(width, False, self.compute_dtype, kernel_init=start, name=name), x)

        def dropped(h: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
            return nn.Dropout(self.dropout, deterministic=False)(h)

        normed = nn.RMSNorm(name="attention_norm")(x)
        query, key, value = (
            dense(normed, features, name, lecun).reshape(*x.shape[:2], self.heads, -1)
            for name in ("query", "key", "value")
        )
        query, key = (rotate(a).astype(self.compute_dtype) for a in (query, key))
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
        x = x + dropped(dense(attended, features, "out", zeros))
        hidden = nn.gelu(dense(nn.RMSNorm(name="feed_forward_norm")(x), self.width, "up", lecun))
        return x + dropped(dense(hidden, features, "down", zeros))


class Transformer(Body):
    """A causal, pre-norm Transformer without biases: rotary positions, RMS norms (a last one too), gelu.

    Dropout is on the input and on what each attention and feed-forward layer adds. At the start those add nothing
    (`out` and `down` are 0), or they would drown the vectors that were looked up, whose entries are small; the other
    kernels are from a truncated normal of variance 1 / fan-in.
    """

    width: Annotated[int, at_least(0), wide] = 0  # of the feed-forward layers; 0 means 4 D
    depth: Annotated[int, at_least(1), at_most(256)] = 1
    heads: Annotated[int, at_least(1), wide] = 4
    dropout: Annotated[float, below_one] = 0.0
    remat: bool = False  # keep the inputs of the blocks alone for the backward pass, and compute the rest again

    def check(self, features: int) -> None:
        possible = [heads for heads in range(1, features // 2 + 1) if features % (2 * heads) == 0]
        if self.heads not in possible:
            allowed = " | ".join(map(str, possible)) or "none"
            raise ConfigError(
                "body.heads", self.heads, f"{allowed}, parts of even width of model.features = {features}"
            )

    @nn.compact
    def __call__(self, x: Float[Array, "*N D"], *, train: bool = False) -> Float[Array, "*N D"]:
        features, dropout = x.shape[-1], self.dropout if train else 0.0
        block = nn.remat(TransformerBlock) if self.remat else TransformerBlock
        h = nn.Dropout(dropout, deterministic=False)(x.reshape(-1, *x.shape[-2:]))
        for i in range(self.depth):
            width = self.width or self.default_width * features
            h = block(self.heads, width, dropout, self.compute_dtype, name=f"block_{i}")(h)
        return nn.RMSNorm(name="norm")(h).reshape(x.shape)


BODIES: dict[str, type[Body] | None] = {"none": None, "mlp": Mlp, "lstm": Lstm, "transformer": Transformer}
