"""What a stream gives. It is a pure function: a batch depends on the seed and the step alone."""

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer


class Batch(NamedTuple):
    inputs: Int[Array, "B L"]
    targets: Int[Array, "B L"]
    mask: Bool[Array, "B L"]  # False where a held-out batch is filled up
    fresh: Bool[Array, "B"]  # whether a row does not go on where that of the batch before ended


def named_key(seed: int | Integer[Array, ""], name: str) -> Array:
    """A random key for one purpose. The name is hashed, so no two purposes share numbers, whatever their order."""
    tag = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return jax.random.fold_in(jax.random.key(jnp.asarray(seed, jnp.uint32)), tag)
