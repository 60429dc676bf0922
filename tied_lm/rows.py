"""What is kept of each row: the fields of row statistics."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

PARTS = ("lookup", "scoring", "pull", "push", "total")
NORMS = (*PARTS, "other")  # statistics of a model that is not this project's have no pull and push, but `other`


def mark_undefined(defined: Bool[Array, "*N"], values: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Values as they are written and returned: NaN where they are undefined. Inside of transformations they are left
    as they are, so that no NaN is made on the device."""
    if isinstance(values, jax.core.Tracer):
        return values
    where = np.where if isinstance(values, np.ndarray) else jnp.where
    with jax.debug_nans(False):  # these are meant
        return where(defined, values, np.float32(np.nan))


class RowStats(NamedTuple):
    """L2 norms of the rows of the split's tables; the cosine of lookup and scoring; and how often each row was looked
    up, and was an unmasked target. `total` and `cosine` are hypothetical if untied. Where lookup or scoring is 0 there
    is no cosine: it is NaN, but 0 inside of jit and other transformations, until `marked`."""

    lookup: Float[Array, "V"]
    scoring: Float[Array, "V"]
    pull: Float[Array, "V"]
    push: Float[Array, "V"]
    total: Float[Array, "V"]
    cosine: Float[Array, "V"]
    input_count: Int[Array, "V"]
    target_count: Int[Array, "V"]

    def marked(self) -> "RowStats":
        """The same with NaN for what is undefined."""
        return self._replace(cosine=mark_undefined((self.lookup > 0) & (self.scoring > 0), self.cosine))


class UseStats(NamedTuple):
    """L2 norms of the rows of the tables of a `UseSplit`, and the cosine of lookup and scoring. Where either is 0 there
    is no cosine: it is NaN, but 0 inside of jit and other transformations, until `marked`."""

    lookup: Float[Array, "*L V"]
    scoring: Float[Array, "*L V"]
    other: Float[Array, "*L V"]
    total: Float[Array, "*L V"]
    cosine: Float[Array, "*L V"]

    def marked(self) -> "UseStats":
        """The same with NaN for what is undefined."""
        return self._replace(cosine=mark_undefined((self.lookup > 0) & (self.scoring > 0), self.cosine))
