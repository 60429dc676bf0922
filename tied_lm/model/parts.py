"""What the uses of a table ask of it: as tables, as sums that may be averaged, and as statistics of the rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tied_lm.model.program import Use
from tied_lm.rows import TokenStats, UseStats, statistics


class UseSplit(NamedTuple):
    """Gradients of the loss in one table, by use: total = lookup + scoring + other. In an untied model `total` is
    hypothetical: there lookup + other is the gradient of one matrix and scoring that of another. Where the ids are
    known, scoring = pull + push, and there are the counts of `RowStats`."""

    loss: Float[Array, ""]
    lookup: Float[Array, "*L V D"]
    scoring: Float[Array, "*L V D"]
    other: Float[Array, "*L V D"]
    total: Float[Array, "*L V D"]
    aux: Any = None
    uses: tuple[Use, ...] = ()
    pull: Float[Array, "V D"] | None = None
    push: Float[Array, "V D"] | None = None
    input_count: Int[Array, "V"] | None = None
    target_count: Int[Array, "V"] | None = None

    def stats(self) -> UseStats | TokenStats:
        """Statistics of the rows."""
        if self.input_count is None or self.target_count is None:
            return UseStats(**statistics(self, UseStats._fields)).marked()
        found = statistics(self, TokenStats._fields)
        return TokenStats(**found, input_count=self.input_count, target_count=self.target_count).marked()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UseParts:
    """The tables of a `UseSplit` times the number of tokens, so that those of microbatches, devices and hosts add up.

    A pytree of sums, three tables (V, D) in float32 or wider, five where the ids are known: `a + b`, a carry of
    `lax.scan` and `lax.psum` all give those of the tokens together. Norms do not add: they are taken by `stats`.
    """

    tokens: Float[Array, ""]
    lookup: Float[Array, "*L V D"]
    scoring: Float[Array, "*L V D"]
    other: Float[Array, "*L V D"]
    pull: Float[Array, "V D"] | None = None
    push: Float[Array, "V D"] | None = None
    input_count: Int[Array, "V"] | None = None
    target_count: Int[Array, "V"] | None = None

    def __add__(self, more: "UseParts") -> "UseParts":
        return jax.tree.map(jnp.add, self, more)

    def stats(self) -> UseStats | TokenStats:
        """Statistics of the rows of the mean over all tokens. Where there is no token all norms are 0."""
        share = 1 / jnp.maximum(self.tokens, jnp.finfo(self.tokens.dtype).tiny)
        tables: dict[str, Any] = {name: x if (x := getattr(self, name)) is None else share * x for name in TABLES}
        tables["total"] = tables["lookup"] + tables["scoring"] + tables["other"]
        counts: dict[str, Any] = {"input_count": self.input_count, "target_count": self.target_count}
        return UseSplit(jnp.zeros(()), **tables, **counts).stats()


TABLES = ("lookup", "scoring", "other", "pull", "push")


def weighed(split: UseSplit, tokens: Float[Array, ""] | Int[Array, ""]) -> UseParts:
    """The sums of a split that is a mean over some tokens; 0 where there are none, for which it may be NaN."""
    tables: dict[str, Any] = {
        name: None if (table := getattr(split, name)) is None else jnp.where(tokens > 0, tokens * table, 0)
        for name in TABLES
    }
    dtype = split.lookup.dtype
    return UseParts(tokens.astype(dtype), **tables, input_count=split.input_count, target_count=split.target_count)
