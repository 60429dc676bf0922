"""What a caller from Python may give. A mistake is a ValueError that names the argument and says what it has to be."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


def check_ids(
    vocab_size: int, inputs: object, targets: object, mask: object = None
) -> tuple[Int[Array, "*N"], Int[Array, "*N"], Bool[Array, "*N"] | None]:
    """Inputs, targets and mask as arrays, from arrays or nested lists.

    Ids have to be in the vocabulary, but for targets that are masked. Under jit only shapes and types can be seen.
    """
    x, y = _array("inputs", inputs, jnp.integer, "integers"), _array("targets", targets, jnp.integer, "integers")
    if x.shape != y.shape:
        raise ValueError(f"inputs has shape {x.shape} and targets {y.shape}: each input needs its target")
    m = None if mask is None else _array("mask", mask, jnp.bool_, "booleans")
    if m is not None and m.shape != y.shape:
        raise ValueError(f"mask has shape {m.shape}, and the targets {y.shape}")
    for name, ids, kept in (("inputs", x, None), ("targets", y, m)):
        if not isinstance(ids, jax.core.Tracer) and not isinstance(kept, jax.core.Tracer):
            values = np.asarray(ids) if kept is None else np.where(kept, ids, 0)
            wrong = values[(values < 0) | (values >= vocab_size)]
            if wrong.size:
                raise ValueError(f"{name} has {wrong[0]}, which is not in [0, vocab_size = {vocab_size})")
    return jnp.asarray(x), jnp.asarray(y), None if m is None else jnp.asarray(m)


def check_integers(name: str, ids: object) -> Int[Array, "*N"]:
    """Integers as an array, from an array or nested lists."""
    return jnp.asarray(_array(name, ids, jnp.integer, "integers"))


def check_table(name: str, table: object) -> None:
    """Refuse what is not an array (V, D) of floats."""
    if not isinstance(table, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(table).__name__}, not an array (V, D) of floats")
    if table.ndim != 2 or not table.size or not jnp.issubdtype(table.dtype, jnp.floating):
        raise ValueError(f"{name} is an array {table.shape} of {table.dtype}, not (V, D) of floats")


def _array(name: str, values: object, kind: type, words: str) -> Array | np.ndarray:
    """An array of one kind; lists are taken where they make one."""
    try:
        array = values if isinstance(values, jax.Array) else np.asarray(values)
    except ValueError:  # lists of unequal lengths
        raise ValueError(f"{name} is not an array of {words}, or lists that make one") from None
    if not array.size:
        raise ValueError(f"{name} is empty")
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} is of {array.dtype}, not an array of {words}, or lists that make one")
    return array
