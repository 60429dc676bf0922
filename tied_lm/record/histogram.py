"""Histograms of row norms on a logarithmic axis, counted on the device."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

LOW, HIGH, BINS = -12, 2, 140  # log10 of a norm
EDGES = np.linspace(LOW, HIGH, BINS + 1)


def log_histogram(norms_V: Float[Array, "V"]) -> Int[Array, "bins"]:
    """Counts of log10 of the norms that are not 0; those beyond an edge count in the outermost bin."""
    position_V = (jnp.log10(norms_V) - LOW) * (BINS / (HIGH - LOW))
    bin_V = jnp.clip(position_V, 0, BINS - 1).astype(jnp.int32)
    return jnp.zeros(BINS, jnp.int32).at[bin_V].add((norms_V > 0).astype(jnp.int32))
