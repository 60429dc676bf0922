"""What is known of the values in the program of a loss, and what an operation without the table makes of them.

A table that is looked up with the inputs and scored with the hidden states is the ordinary case. A gather can score as
well: the loss may multiply the hidden states by the rows of the targets, or of a sample. Two things tell it apart.
Rows that are looked up go into what is scored; rows of other ids, that reach the loss on another way, may themselves
be scored. And where rows are scored, two activations are multiplied and summed, and no product with a parameter
follows: in attention one does, or the scoring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

Key = tuple[int, ...]  # the way to an equation: its place, and those of the equations that it is inside of
Keys = frozenset[Key]
Eqn = Any  # core.JaxprEqn, which is typed in part

CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
PRODUCTS = ("dot_general", "conv_general_dilated")
# Half of what is multiplied may be another part of one value: positions, or gates.
PARTS = ("slice", "dynamic_slice", "gather", "concatenate", "split", "rev", *PRODUCTS)
CURVED = frozenset(
    {"integer_pow", "square", "pow", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt", "rsqrt"}
    | {"abs", "max", "min", "sign", "sin", "cos", "erf", "erf_inv", "cbrt"}
)


@dataclass(frozen=True)
class Value:
    """What is known of a variable. Where values meet, kinds win in this order: literal < scalar < data (both of the
    closure, or without a gradient) < parameter < table < activation."""

    kind: str = "literal"
    rows: frozenset[int] | None = frozenset()  # axes of the table's rows; empty: summed over; None: lost
    reached: Keys = frozenset()  # uses of the table that it depends on
    looked_up: Keys = frozenset()  # lookups that it depends on, and not through a scoring
    times: Keys = frozenset()  # those multiplied by another activation, with nothing but sums since
    paired: Keys = frozenset()  # those multiplied by another activation and summed over, with no parameter since
    origin: Keys = frozenset()  # the equations that it is made from, by operations on single entries
    scored: bool = False  # rows that the user calls scoring
    one_hot: int | None = None  # the axis along which it is so
    counting: int | None = None  # the axis along which it is 0, 1, 2, ..
    flat: frozenset[int] = frozenset()  # axes along which it is constant
    number: int | None = None  # equal for equal integers

    @property
    def moves(self) -> bool:
        """Whether a parameter moves it, so that it may score."""
        return self.kind == "activation"


SETS = ("reached", "looked_up", "times", "paired", "origin")


def kind_of(values: Sequence[Value]) -> str:
    kinds = {value.kind for value in values}
    if "activation" in kinds or {"parameter", "data"} <= kinds:
        return "activation"
    return next((kind for kind in ("parameter", "data", "scalar") if kind in kinds), "literal")


def together(values: Sequence[Value]) -> Value:
    """What depends on all of them, and is not the table."""
    sets: dict[str, Any] = {name: frozenset[Key]().union(*(getattr(v, name) for v in values)) for name in SETS}
    return Value(kind_of(values), scored=any(v.scored for v in values), **sets)


def either(values: Sequence[Value]) -> Value:
    """What is one of them."""
    if len(set(values)) == 1:
        return values[0]
    tables, others = [v for v in values if v.kind == "table"], [v for v in values if v.kind != "table"]
    joined = together(values)
    if not tables:
        return joined
    lost = any(v.moves for v in others) or len({v.rows for v in tables}) > 1
    return replace(joined, kind="table", rows=None if lost else tables[0].rows)


def without_gradient(value: Value) -> Value:
    """An integer, or what a gradient is stopped at: the loss depends on it, but no parameter moves it."""
    kind = "data" if value.kind in ("table", "activation", "parameter") else value.kind
    nothing: dict[str, Any] = dict.fromkeys(SETS, frozenset())
    return replace(value, kind=kind, scored=False, **nothing)


def after_scoring(values: Sequence[Value]) -> Value:
    """What was scored, or was made of the scores."""
    return Value("activation", reached=together(values).reached)


def product_of(eqn: Eqn, values: Sequence[Value], key: Key) -> Value:
    """What an operation without the table makes of its operands, as far as lookups go."""
    out, name = together(values), eqn.primitive.name
    moving = [v for i, v in enumerate(values) if v.moves and eqn.invars[i] not in eqn.invars[:i]]
    if name in PARTS:
        out = replace(out, origin=frozenset({key}) if out.origin else frozenset())
    if name in PRODUCTS and any(v.kind == "parameter" for v in values):
        return replace(out, times=frozenset(), paired=frozenset())
    if name in PRODUCTS or name in CUSTOM:
        if len(moving) > 1 or (name in PRODUCTS and sum(v.moves for v in values) > 1):
            return replace(out, times=frozenset(), paired=out.paired | out.looked_up)
        return replace(out, times=frozenset(), paired=out.paired | out.times) if name in PRODUCTS else out
    if name.startswith(("reduce_sum", "cumsum", "psum", "add_any")):
        return replace(out, times=frozenset(), paired=out.paired | out.times)
    if name in ("mul", "div") and len(moving) == 2 and not _of_one(moving, flat_axes(eqn, values)):
        return replace(out, times=out.looked_up)
    return replace(out, times=frozenset()) if name in CURVED else out


def _of_one(values: Sequence[Value], flat: Sequence[frozenset[int]]) -> bool:
    """Whether both are made from one value entry by entry, as in a normalisation and an entropy."""
    (a, b), (a_flat, b_flat) = values, flat
    return a.origin == b.origin and (a_flat <= b_flat or b_flat <= a_flat)


def flat_axes(eqn: Eqn, values: Sequence[Value]) -> list[frozenset[int]]:
    """The axes of what an operation on single entries gives, along which each operand is constant."""
    out = eqn.outvars[0].aval.shape
    shapes = [v.aval.shape for v in eqn.invars]
    return [
        value.flat | {a for a, size in enumerate(shape) if len(shape) == len(out) and size == 1 < out[a]}
        for value, shape in zip(values, shapes, strict=True)
    ]


def shape_facts(eqn: Eqn, values: Sequence[Value]) -> dict[str, Any]:
    """One-hot, counting and constant axes of what an operation gives."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    if name == "iota":
        flat = frozenset(range(len(shape))) - {params["dimension"]}
        return {"counting": params["dimension"], "flat": flat}
    if name == "broadcast_in_dim":
        before, to = eqn.invars[0].aval.shape, params["broadcast_dimensions"]
        kept = {j for i, j in enumerate(to) if i not in values[0].flat and before[i] == shape[j]}
        counting, one_hot = (
            to[a] if a is not None and before[a] == shape[to[a]] else None
            for a in (values[0].counting, values[0].one_hot)
        )
        return {"counting": counting, "one_hot": one_hot, "flat": frozenset(range(len(shape))) - kept}
    if name == "eq":
        for at in (0, 1):
            along, b, ids = values[at].counting, values[1 - at], eqn.invars[1 - at].aval.shape
            if along is not None and (not ids or ids[along] == 1 or along in b.flat):
                return {"one_hot": along}
    if name in ("convert_element_type", "copy"):
        return {"one_hot": values[0].one_hot, "counting": values[0].counting, "flat": values[0].flat}
    if name in ("mul", "and") and shape:
        return {"one_hot": next((v.one_hot for v in values if v.one_hot is not None), None)}
    if name == "transpose" and values[0].one_hot is not None:
        return {"one_hot": params["permutation"].index(values[0].one_hot)}
    return {}


def moved(value: Value, by: int) -> Value:
    """Without the first axis, which a scan takes away, or with one more."""
    rows = value.rows
    if value.kind == "table" and rows is not None:
        rows = None if by < 0 and rows == {0} else frozenset(r + by for r in rows if r + by >= 0)
    return replace(value, rows=rows, one_hot=None, counting=None, flat=frozenset(), number=None)


def is_integer(eqn: Eqn) -> bool:
    return all(not jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
