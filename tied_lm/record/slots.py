"""What a recorded update saw and did, and how the device keeps several of them."""

from collections.abc import Collection
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tied_lm.bands import NAMES
from tied_lm.record.histogram import BINS
from tied_lm.rows import PARTS, RowStats


@runtime_checkable
class Recorded(Protocol):
    """What the record needs to know of a model; see `model.embedding.VocabularyModel`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def vocabulary(self) -> tuple[str, ...]: ...
    @property
    def others(self) -> tuple[str, ...]: ...
    @property
    def push_parts(self) -> tuple[str, ...]: ...


class Record(NamedTuple):
    """One recorded update."""

    stats: RowStats
    push_parts: dict[str, Float[Array, "V"]]  # L2 norms of the rows, of a scheme that tells parts of its push apart
    updates: dict[str, Float[Array, "V"]]  # L2 norms of the rows of the applied update, by vocabulary parameter
    weights: dict[str, Float[Array, "V"]]  # and of the rows themselves, before the update
    others: dict[str, Float[Array, "2"]]  # norms of the gradient by lookup and by scoring, of other parameters
    histograms: Int[Array, "parts bins"]  # of the row norms of each of PARTS
    residual: Float[Array, ""]


class Probe(NamedTuple):
    """Norms of the tables summed over all tokens of the probe."""

    stats: RowStats
    push_parts: dict[str, Float[Array, "V"]]
    tokens: Int[Array, ""]


class Geometry(NamedTuple):
    """Where the rows of the vocabulary's matrices are at a probe."""

    drift: dict[str, Float[Array, "V"]]  # from the start, by `drift_field`; a cosine of 0 is undefined
    rows: dict[str, Float[Array, "M D"]]  # those that are measured, by parameter


def drift_field(field: str, name: str, vocabulary: Collection[str]) -> str:
    """What a field of the drift, or another of one matrix, is called where there are several."""
    return f"{field}_{name}" if len(vocabulary) > 1 else field


class Evaluation(NamedTuple):
    """Sums for each held-out sequence (S = M batches of B), by band of the target (G)."""

    nll: Float[Array, "S G"]
    tokens: Int[Array, "S G"]
    excess: Float[Array, "S"] | None  # divergence of the model from the true law in the context of each token, nats
    law: Float[Array, "S"] | None  # loss of the true law on the same tokens
    bytes: Int[Array, "S"] | None  # of text that the targets stand for

    def by_sequence(self) -> dict[str, Float[np.ndarray, "S"]]:
        """What there is of each sequence, by name: `nll_<band>` and `tokens_<band>`, and the others as they are."""
        found = {f"nll_{NAMES[band]}": nll_S for band, nll_S in enumerate(self.nll.T)}
        found |= {f"tokens_{NAMES[band]}": tokens_S for band, tokens_S in enumerate(self.tokens.T)}
        others = {"excess": self.excess, "law": self.law, "bytes": self.bytes}
        return found | {name: values_S for name, values_S in others.items() if values_S is not None}


class Records(NamedTuple):
    """Slots (S) of records, in few arrays, so that writing one is cheap beside a small step.

    All that has a value for each row is in one array (F, V): the fields of RowStats, parts of the push, updates,
    weights. Counts are whole in float32 to 2**24.
    """

    rows: Float[Array, "S F V"]
    others: Float[Array, "S O 2"]
    histograms: Int[Array, "S parts bins"]
    residual: Float[Array, "S"]

    @classmethod
    def empty(cls, slots: int, model: Recorded) -> "Records":
        """Room for records of a model."""
        return cls(
            jnp.zeros((slots, _by_row(model).num_leaves, model.vocab_size)),
            jnp.zeros((slots, len(model.others), 2)),
            jnp.zeros((slots, len(PARTS), BINS), jnp.int32),
            jnp.zeros(slots),
        )

    def write(self, slot: Int[Array, ""], one: "Records") -> "Records":
        """The slots with one of them replaced; `one` lacks the axis S."""
        return jax.tree.map(lambda slots, new: jax.lax.dynamic_update_index_in_dim(slots, new, slot, 0), self, one)

    def read(self, slot: int, model: Recorded) -> Record:
        """The record in a slot."""
        return Record(
            **jax.tree.unflatten(_by_row(model), self.rows[slot]),
            others=dict(zip(model.others, self.others[slot], strict=True)),
            histograms=self.histograms[slot],
            residual=self.residual[slot],
        )


def _by_row(model: Recorded) -> jax.tree_util.PyTreeDef:
    """What a record has for each row of a model, as fields of `Record`; a leaf has a value for each row."""
    parts, of_each = dict.fromkeys(model.push_parts, 0), dict.fromkeys(model.vocabulary, 0)
    return jax.tree.structure(
        {"stats": RowStats._make(RowStats._fields), "push_parts": parts, "updates": of_each, "weights": of_each}
    )


def pack(record: Record) -> Records:
    """A record as the content of one slot."""
    rows = jax.tree.leaves({name: getattr(record, name) for name in ("stats", "push_parts", "updates", "weights")})
    others = jnp.stack(list(record.others.values())) if record.others else jnp.zeros((0, 2))
    return Records(jnp.stack([row.astype(jnp.float32) for row in rows]), others, record.histograms, record.residual)
