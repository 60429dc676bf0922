"""What a recorded update saw and did, and how the device keeps several of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tied_lm.gradients import PARTS, RowStats
from tied_lm.histogram import BINS


class Record(NamedTuple):
    """One recorded update."""

    stats: RowStats
    updates: dict[str, Float[Array, "V"]]  # L2 norms of the rows of the applied update, by vocabulary parameter
    weights: dict[str, Float[Array, "V"]]  # and of the rows themselves, before the update
    histograms: Int[Array, "parts bins"]  # of the row norms of each of PARTS
    residual: Float[Array, ""]


class Records(NamedTuple):
    """Slots (S) of records, in few arrays, so that writing one is cheap beside a small step.

    All that has a value for each row is in one array (F, V): the fields of RowStats, then updates, then weights.
    Counts are whole in float32 to 2**24.
    """

    rows: Float[Array, "S F V"]
    histograms: Int[Array, "S parts bins"]
    residual: Float[Array, "S"]

    @classmethod
    def empty(cls, slots: int, vocab_size: int, parameters: int) -> "Records":
        """Room for records of a model with so many vocabulary parameters."""
        fields = len(RowStats._fields) + 2 * parameters
        return cls(
            jnp.zeros((slots, fields, vocab_size)), jnp.zeros((slots, len(PARTS), BINS), jnp.int32), jnp.zeros(slots)
        )

    def write(self, slot: Int[Array, ""], one: "Records") -> "Records":
        """The slots with one of them replaced; `one` lacks the axis S."""
        return jax.tree.map(lambda slots, new: jax.lax.dynamic_update_index_in_dim(slots, new, slot, 0), self, one)

    def read(self, slot: int, vocabulary: tuple[str, ...]) -> Record:
        """The record in a slot."""
        rows = list(self.rows[slot])
        stats, updates = rows[: len(RowStats._fields)], rows[len(RowStats._fields) :]
        weights = updates[len(vocabulary) :]
        return Record(
            RowStats(*stats),
            dict(zip(vocabulary, updates, strict=False)),
            dict(zip(vocabulary, weights, strict=True)),
            self.histograms[slot],
            self.residual[slot],
        )


def pack(record: Record) -> Records:
    """A record as the content of one slot."""
    rows = [*record.stats, *record.updates.values(), *record.weights.values()]
    return Records(jnp.stack([row.astype(jnp.float32) for row in rows]), record.histograms, record.residual)
