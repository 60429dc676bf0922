"""What a stream gives. It is a pure function: a batch depends on the seed and the step alone."""

import hashlib
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, Shaped


class Batch(NamedTuple):
    inputs: Int[Array, "B L"]
    targets: Int[Array, "B L"]
    mask: Bool[Array, "B L"]  # False where a held-out batch is filled up
    fresh: Bool[Array, "B"]  # whether a row does not go on where that of the batch before ended


@runtime_checkable
class Devices(Protocol):
    """Where batches are to lie: on one device, as here, or as `model.mesh.Layout` says."""

    def own_sequences(self, count: int) -> slice:
        """Of the sequences of a batch, those that this process makes."""
        return slice(0, count)

    def from_own(self, part: Shaped[np.ndarray, "..."], axis: int, count: int) -> Array:
        """What it has made of them, on the host, as an array of all; `axis` is that of the sequences."""
        return jnp.asarray(part)


class _OneDevice(Devices): ...


ONE_DEVICE = _OneDevice()


def named_key(seed: int | Integer[Array, ""], name: str) -> Array:
    """A random key for one purpose. The name is hashed, so no two purposes share numbers, whatever their order."""
    tag = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return jax.random.fold_in(jax.random.key(jnp.asarray(seed, jnp.uint32)), tag)
