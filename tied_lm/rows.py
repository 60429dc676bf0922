"""The table of row statistics: what there is of each row of a split, its formula, and how it is shown."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def mark_undefined(defined: Bool[Array, "*N"], values: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Values as they are written and returned: NaN where they are undefined. Inside of transformations they are left
    as they are, so that no NaN is made on the device."""
    if isinstance(values, jax.core.Tracer):
        return values
    where = np.where if isinstance(values, np.ndarray) else jnp.where
    with jax.debug_nans(False):  # these are meant
        return where(defined, values, np.float32(np.nan))


def row_norm(table_RxD: Float[Array, "*R D"]) -> Float[Array, "*R"]:
    """L2 norm of each row."""
    return jnp.sqrt(jnp.sum(table_RxD * table_RxD, axis=-1))


def row_cosine(a_RxD: Float[Array, "*R D"], b_RxD: Float[Array, "*R D"]) -> Float[Array, "*R"]:
    """Cosine of each pair of rows; 0 where either is 0, so that it is undefined."""
    a_R, b_R = row_norm(a_RxD), row_norm(b_RxD)
    # One after the other, since the product of two tiny norms is 0 in float32. The inverse of one is finite, and to
    # multiply by it takes half of the time of dividing.
    a_inverse_R, b_inverse_R = (1 / jnp.where(norm_R > 0, norm_R, 1) for norm_R in (a_R, b_R))
    dot_R = jnp.sum(a_RxD * a_inverse_R[..., None] * b_RxD, axis=-1) * b_inverse_R
    return jnp.where((a_R > 0) & (b_R > 0), jnp.clip(dot_R, -1, 1), 0)


Values = Mapping[str, Float[np.ndarray, "R"]]  # of some rows, by field


def _norm_of_rows(values: Values, name: str) -> float:
    return float(np.sqrt(np.sum(values[name] ** 2)))


def _share_of_rows(values: Values, name: str) -> float:
    lookup, scoring = (_norm_of_rows(values, use) for use in ("lookup", "scoring"))
    return lookup**2 / (lookup**2 + scoring**2) if lookup or scoring else math.nan


def _cosine_of_rows(values: Values, name: str) -> float:
    lookup, scoring = (_norm_of_rows(values, use) for use in ("lookup", "scoring"))
    products = values["lookup"] * values["scoring"]
    dot = float(np.sum(products * values[name], where=products > 0))
    return dot / (lookup * scoring) if lookup and scoring else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What statistics of one kind have in common."""

    units: str
    group: str | None = None  # what the tag of the whole table begins with; None if only the rows are kept
    of_rows: Callable[[Values, str], float] | None = None  # the field of many rows, from all their fields
    by_row: bool = False  # shown as a histogram, as the fraction of zeros and as curves of single tokens
    defined: Callable[[Any], Bool[Array, "*L V"]] | None = None  # in which rows; None if in all


NORM = Kind(units="nats / parameter", group="grad_norm", of_rows=_norm_of_rows, by_row=True)
SHARE = Kind(units="1", group="split", of_rows=_share_of_rows)
COSINE = Kind(
    units="1",
    group="split",
    of_rows=_cosine_of_rows,
    defined=lambda stats: (stats.lookup > 0) & (stats.scoring > 0),
)
COUNT = Kind(units="tokens")
DRIFT = {"cosine_to_start": Kind(units="1"), "distance_to_start": Kind(units="parameter")}


@dataclasses.dataclass(frozen=True)
class Field:
    """One statistic. It has a meaning in the splits whose statistics, `RowStats` or `UseStats`, have its name."""

    kind: Kind
    formula: Callable[[Any], Float[Array, "*L R"]] | None = None  # from rows of the split's tables; None if counted
    hypothetical: bool = False  # in an untied model, whose two matrices have arbitrary scales


# In the order in which they are shown. The share is of many rows alone.
FIELDS = {
    "lookup": Field(NORM, lambda split: row_norm(split.lookup)),
    "scoring": Field(NORM, lambda split: row_norm(split.scoring)),
    "pull": Field(NORM, lambda split: row_norm(split.pull)),
    "push": Field(NORM, lambda split: row_norm(split.push)),
    "total": Field(NORM, lambda split: row_norm(split.total), hypothetical=True),
    "other": Field(NORM, lambda split: row_norm(split.other)),
    "share": Field(SHARE, hypothetical=True),
    "cosine": Field(COSINE, lambda split: row_cosine(split.lookup, split.scoring), hypothetical=True),
    "input_count": Field(COUNT),
    "target_count": Field(COUNT),
    **{name: Field(kind) for name, kind in DRIFT.items()},  # of the rows themselves, at the steps of the probe
}


def statistics(split: Any, fields: Iterable[str]) -> dict[str, Float[Array, "*L R"]]:
    """Those of the fields that have a formula, of the rows of a split's tables."""
    return {name: formula(split) for name in fields if (formula := FIELDS[name].formula)}


def _marked(stats: Any) -> dict[str, Float[Array, "*L V"]]:
    """The fields of row statistics that may be undefined, with NaN where they are."""
    defined = {name: FIELDS[name].kind.defined for name in stats._fields}
    return {name: mark_undefined(of(stats), getattr(stats, name)) for name, of in defined.items() if of}


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
        return self._replace(**_marked(self))


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
        return self._replace(**_marked(self))


class TokenStats(NamedTuple):
    """What `UseStats` and `RowStats` have, of somebody else's model whose ids are known."""

    lookup: Float[Array, "V"]
    scoring: Float[Array, "V"]
    pull: Float[Array, "V"]
    push: Float[Array, "V"]
    other: Float[Array, "V"]
    total: Float[Array, "V"]
    cosine: Float[Array, "V"]
    input_count: Int[Array, "V"]
    target_count: Int[Array, "V"]

    def marked(self) -> "TokenStats":
        """The same with NaN for what is undefined."""
        return self._replace(**_marked(self))


Stats = RowStats | UseStats | TokenStats


def shown_by_group(fields: Iterable[str]) -> list[str]:
    """What is told of many rows, given the fields of their statistics."""
    present = {*fields, "share"}
    return [name for name, field in FIELDS.items() if name in present and field.kind.group]


def shown_by_row(fields: Iterable[str]) -> list[str]:
    """Those of the fields that are shown row by row."""
    return [name for name in shown_by_group(fields) if FIELDS[name].kind.by_row]


def tag(tag: str, field: str, tied: bool) -> str:
    """The tag of a field's scalar or histogram: one that is hypothetical says so, so that it overlays no tied run's."""
    return f"hypothetical/{tag}" if FIELDS[field].hypothetical and not tied else tag


PARTS = shown_by_row(RowStats._fields)  # of which the device counts histograms
