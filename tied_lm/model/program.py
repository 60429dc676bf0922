"""The uses that a loss makes of a table, found in its program (the jaxpr of the loss).

What is computed from parameters and constants alone is still the table in another form, and is followed: casts,
transposes, blocks, normalisation. A use is where it meets an activation. A `gather` of rows by ids is a lookup, and so
is the product of a matrix that is provably one-hot; a product over the features is a scoring; what no longer has the
axis of the rows (a norm, a penalty, the mean row) is `other`. What cannot be told is `unclear`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

Key = tuple[int, ...]  # the way to an equation: its place, and those of the equations that it is inside of
Eqn = Any  # core.JaxprEqn, which is typed in part

CALLS = ("jit", "pjit", "closed_call", "core_call")
REMAT = ("remat2", "remat", "checkpoint")
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
LIBRARIES = ("jax", "flax", "haiku", "equinox", "optax")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Use:
    """One use of a table: lookup, scoring, other or unclear; the primitive or custom rule; the shape of what the table
    has become there; the line of the source, as "model.py:12"; and why it is unclear."""

    kind: str
    name: str
    shape: tuple[int, ...]
    source: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} of {self.shape} at {self.source}"


@dataclass(frozen=True)
class _Value:
    """What is known of a variable: of what it is made, ordered by what wins when values meet."""

    # literal < scalar < data (both of the closure) ; parameter ; table ; activation
    kind: str = "literal"
    rows: frozenset[int] | None = frozenset()  # axes of the table's rows; empty: summed over; None: lost
    raw: frozenset[Key] = frozenset()  # lookups whose rows reach it through no product with a parameter or scoring
    one_hot: int | None = None
    counting: int | None = None  # the axis along which it is 0, 1, 2, ..
    flat: frozenset[int] = frozenset()  # axes along which it is constant


def _kind(values: Sequence[_Value]) -> str:
    kinds = {value.kind for value in values}
    if "activation" in kinds or {"parameter", "data"} <= kinds:
        return "activation"
    return next((kind for kind in ("parameter", "data", "scalar") if kind in kinds), "literal")


def _join(a: _Value, b: _Value) -> _Value:
    """What is either of two."""
    raw = a.raw | b.raw
    if a == b:
        return a
    if "table" not in (a.kind, b.kind):
        return _Value(_kind([a, b]), raw=raw)
    tables, others = [v for v in (a, b) if v.kind == "table"], [v for v in (a, b) if v.kind != "table"]
    lost = any(v.kind == "activation" for v in others) or len({v.rows for v in tables}) > 1
    return _Value("table", None if lost else tables[0].rows, raw)


def source_of(eqn: Eqn) -> str:
    """The line that made an equation: the innermost that is not a library's."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not _of_library(frame.file_name):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return "?"


def _of_library(file: str) -> bool:
    parts = Path(file).parts
    return "site-packages" in parts and parts[parts.index("site-packages") + 1] in LIBRARIES


def inner_program(eqn: Eqn, name: str = "jaxpr") -> tuple[core.Jaxpr, Sequence[Any]]:
    jaxpr = eqn.params[name]
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def _name(eqn: Eqn) -> str:
    if eqn.primitive.name not in CUSTOM:
        return eqn.primitive.name
    jaxpr, _ = inner_program(eqn, "call_jaxpr" if "call_jaxpr" in eqn.params else "fun_jaxpr")
    return str(jaxpr.debug_info.func_src_info).split(" at ")[0]


@dataclass
class Analysis:
    """A walk through a program that follows the table."""

    named: Mapping[str, str]
    found: dict[Key, tuple[Use, frozenset[int]]] = field(default_factory=dict)  # uses, with the operands to gate
    applied: set[str] = field(default_factory=set)
    line: str = ""  # of a call of a library, whose own program may have been traced for another caller

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[_Value], path: Key = ()) -> list[_Value]:
        env: dict[Any, _Value] = dict(zip(jaxpr.invars, args, strict=True))
        env |= {v: _Value("data" if jnp.ndim(x) else "scalar") for v, x in zip(jaxpr.constvars, consts, strict=True)}

        def read(v: Any) -> _Value:
            return _Value("data" if jnp.ndim(v.val) else "literal") if isinstance(v, core.Literal) else env[v]

        for i, eqn in enumerate(jaxpr.eqns):
            values = [read(v) for v in eqn.invars]
            env |= zip(eqn.outvars, self._equation(eqn, values, (*path, i)), strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Eqn, values: list[_Value], key: Key) -> list[_Value]:
        name = eqn.primitive.name
        if name in CALLS or name in REMAT or name == "shard_map":
            jaxpr, consts = inner_program(eqn)
            before = self.line
            if _of_library(str(jaxpr.debug_info.func_src_info).split(" at ")[-1]):
                self.line = before or source_of(eqn)
            outs = self.run(jaxpr, consts, values, key)
            self.line = before
            return outs
        if name == "scan":
            return self._scan(eqn, values, key)
        if name == "cond":
            inner = enumerate(eqn.params["branches"])
            branches = [self.run(b.jaxpr, b.consts, values[1:], (*key, n)) for n, b in inner]
            return [_join_all(outs) for outs in zip(*branches, strict=True)]
        if any(v.kind == "table" for v in values):
            outs = self._table(eqn, values, key)
        else:
            outs = [self._other(eqn, values)] * len(eqn.outvars)
        floats = [jnp.issubdtype(v.aval.dtype, jnp.inexact) and name != "stop_gradient" for v in eqn.outvars]
        return [
            out if has_gradient else replace(out, raw=frozenset(), kind="data" if out.kind == "table" else out.kind)
            for out, has_gradient in zip(outs, floats, strict=True)
        ]

    def _scan(self, eqn: Eqn, values: list[_Value], key: Key) -> list[_Value]:
        consts, carries = scan_sizes(eqn)
        fixed, carry = values[:consts], values[consts : consts + carries]
        xs = [_moved(v, -1) for v in values[consts + carries :]]
        while True:
            outs = self.run(*inner_program(eqn), [*fixed, *carry, *xs], key)
            after = [_join(a, b) for a, b in zip(carry, outs, strict=False)]
            if after == carry:
                return [*carry, *(_moved(v, 1) for v in outs[carries:])]
            carry = after
            self.found = {k: v for k, v in self.found.items() if k[: len(key)] != key}

    def _other(self, eqn: Eqn, values: list[_Value]) -> _Value:
        """A value that is not the table."""
        name, params = eqn.primitive.name, eqn.params
        out = _Value(_kind(values), raw=frozenset().union(*(v.raw for v in values)))
        if name in ("dot_general", "conv_general_dilated") and any(v.kind == "parameter" for v in values):
            return replace(out, raw=frozenset())
        shape = eqn.outvars[0].aval.shape
        if name == "iota":
            flat = frozenset(range(len(shape))) - {params["dimension"]}
            return replace(out, counting=params["dimension"], flat=flat)
        if name == "broadcast_in_dim":
            before, to = eqn.invars[0].aval.shape, params["broadcast_dimensions"]
            kept = {j for i, j in enumerate(to) if i not in values[0].flat and before[i] == shape[j]}
            counting, one_hot = (
                to[a] if a is not None and before[a] == shape[to[a]] else None
                for a in (values[0].counting, values[0].one_hot)
            )
            return replace(out, counting=counting, one_hot=one_hot, flat=frozenset(range(len(shape))) - kept)
        if name == "eq":
            for at in (0, 1):
                along, b, ids = values[at].counting, values[1 - at], eqn.invars[1 - at].aval.shape
                if along is not None and (not ids or ids[along] == 1 or along in b.flat):
                    return replace(out, one_hot=along)
        if name in ("convert_element_type", "copy"):
            return replace(values[0], kind=out.kind, raw=out.raw)
        if name in ("mul", "and") and shape:
            return replace(out, one_hot=next((v.one_hot for v in values if v.one_hot is not None), None))
        if name == "transpose":
            axis, order = values[0].one_hot, params["permutation"]
            return replace(out, one_hot=None if axis is None else order.index(axis))
        return out

    def _table(self, eqn: Eqn, values: list[_Value], key: Key) -> list[_Value]:
        """An equation that the table goes into."""
        tables = frozenset(i for i, v in enumerate(values) if v.kind == "table")
        others = [v for i, v in enumerate(values) if i not in tables]
        rows = [values[i].rows for i in tables]
        kind, why = _use(eqn, values, tables)
        name, source = _name(eqn), self.line or source_of(eqn)
        named = {name, source, f"{source} {name}"} & set(self.named)
        if named and (kind or eqn.primitive.name in CUSTOM):
            self.applied |= named
            kind, why = self.named[max(named, key=len)], ""
        if kind is None:
            raw = frozenset().union(*(v.raw for v in values))
            new = _rows_after(eqn, values, tables) if None not in rows else [None] * len(eqn.outvars)
            return [_Value("table", r, raw) for r in new]
        shape = eqn.invars[min(tables)].aval.shape
        self.found[key] = Use(kind, name, shape, source, why), tables
        raw = frozenset() if kind == "scoring" else frozenset().union(*(v.raw for v in others))
        raw |= {key} if kind == "lookup" and not named else set()
        return [_Value("activation", raw=raw)] * len(eqn.outvars)


def _join_all(values: Sequence[_Value]) -> _Value:
    out = values[0]
    for value in values[1:]:
        out = _join(out, value)
    return out


def _moved(value: _Value, by: int) -> _Value:
    """Without the first axis, which a scan takes away, or with one more."""
    rows = value.rows
    if value.kind == "table" and rows is not None:
        rows = None if by < 0 and rows == {0} else frozenset(r + by for r in rows if r + by >= 0)
    return _Value(value.kind, rows, value.raw)


def _use(eqn: Eqn, values: list[_Value], tables: frozenset[int]) -> tuple[str | None, str]:
    """The kind of use that an equation makes of the table, None if it hands it on; and why it is unclear."""
    name = eqn.primitive.name
    others = [v for i, v in enumerate(values) if i not in tables]
    rows = values[min(tables)].rows
    activation = any(v.kind == "activation" for v in others)
    if name == "while":
        return "unclear", "a `while` has no reverse derivative"
    if name in CUSTOM and (activation or any(v.kind == "data" for v in others)):
        return "unclear", "a custom rule is not looked into"
    if name in ("gather", "dynamic_slice") and 0 in tables and all(v.kind == "literal" for v in others):
        return None, ""
    if name == "gather" and 0 in tables and rows:
        along = frozenset(eqn.params["dimension_numbers"].start_index_map)
        if along <= rows:
            return "lookup", ""
        return "unclear", "it gathers along another axis than the rows"
    if name == "dynamic_slice" and 0 in tables and rows and all(eqn.params["slice_sizes"][r] == 1 for r in rows):
        return "lookup", ""
    if name == "dot_general" and len(tables) == 1:
        (at,) = tables
        contract, batch = (pair[at] for pair in eqn.params["dimension_numbers"])
        other = values[1 - at]
        if rows and rows & set(contract):
            if other.one_hot is not None and {other.one_hot} == set(eqn.params["dimension_numbers"][0][1 - at]):
                return "lookup", ""
            if activation or other.kind == "data":
                return "unclear", "a product over the rows, of what is not provably one-hot"
        elif rows and not rows & set(batch) and (activation or other.kind == "data"):
            return "scoring", ""
    if not activation:
        return None, ""
    if rows == frozenset():
        return "other", ""
    return "unclear", "the table meets an activation, and is neither gathered nor multiplied by it over the features"


def _rows_after(eqn: Eqn, values: list[_Value], tables: frozenset[int]) -> list[frozenset[int] | None]:
    """The axes of the rows in what an equation makes of the table; None where they are lost."""
    name, params = eqn.primitive.name, eqn.params
    at = min(tables)
    rows, before = frozenset().union(*(values[i].rows or () for i in tables)), eqn.invars[at].aval.shape
    after = [v.aval.shape for v in eqn.outvars]
    if name == "transpose":
        return [frozenset(new for new, old in enumerate(params["permutation"]) if old in rows)]
    if name == "broadcast_in_dim":
        return [frozenset(params["broadcast_dimensions"][r] for r in rows)]
    if name == "squeeze" or (name.startswith("reduce_") and "axes" in params):
        gone = {a % len(before) for a in params["dimensions" if name == "squeeze" else "axes"]}
        kept = [a for a in range(len(before)) if a not in gone]
        return [frozenset(new for new, old in enumerate(kept) if old in rows)] * len(after)
    if name == "reshape":
        return [_reshaped(before, after[0], rows)]
    if name == "dot_general" and len(tables) == 1 and at == 0:
        (contract, _), (batch, _) = params["dimension_numbers"]
        kept = [*batch, *(a for a in range(len(before)) if a not in (*contract, *batch))]
        return [None if rows & set(contract) else frozenset(new for new, old in enumerate(kept) if old in rows)]
    if name == "dot_general" and len(tables) == 1:
        (_, contract), (_, batch) = params["dimension_numbers"]
        kept = [a for a in range(len(before)) if a not in (*contract, *batch)]
        start = len(after[0]) - len(kept)
        return [None if rows & {*contract, *batch} else frozenset(start + kept.index(r) for r in rows)]
    if name == "slice" and any(after[0][r] == 1 < before[r] for r in rows):
        return [frozenset()]  # a row by its number
    if name in ("slice", "dynamic_slice", "pad", "concatenate") or all(shape == before for shape in after):
        return [rows if len(shape) == len(before) else None for shape in after]
    if name in CUSTOM:  # a table in, a table out; the others are taken for the other parameters that went in
        others = {v.aval.shape for i, v in enumerate(eqn.invars) if i not in tables}
        return [rows if shape == before else frozenset() if shape in others else None for shape in after]
    return [None if rows else frozenset()] * len(after)


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], rows: frozenset[int]) -> frozenset[int] | None:
    """The axes that the rows have become, if they mix with no other."""
    new: set[int] = set()
    for r in rows:
        ahead, size, taken = prod(before[:r]), before[r], 1
        axes = [a for a in range(len(after)) if prod(after[:a]) >= ahead and prod(after[: a + 1]) <= ahead * size]
        for a in axes:
            taken *= after[a]
        if taken != size:
            return None
        new |= {a for a in axes if after[a] > 1}
    return frozenset(new)


def scan_sizes(eqn: Eqn) -> tuple[int, int]:
    """How many constants and how many carries a scan has. Newer releases of JAX keep them as trees."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carries)


def find_uses(
    closed: core.ClosedJaxpr, table: int, rows: int, named: Mapping[str, str]
) -> dict[Key, tuple[Use, frozenset[int]]]:
    """The uses that a program makes of one of its arguments, by their place in it, with the operands that they take.

    Args:
        closed: its first output is the loss; its arguments are parameters.
        table, rows: which argument, and which of its axes the rows are.
        named: kinds of uses that the user names, by name of a call or line of the source.
    """
    analysis = Analysis(named)
    args = [_Value("parameter")] * len(closed.jaxpr.invars)
    args[table] = _Value("table", frozenset({rows}))
    (loss, *_) = analysis.run(closed.jaxpr, closed.consts, args)
    found = analysis.found
    if loss.kind == "table":
        found[(-1,)] = Use("other", "the loss", (), "?"), frozenset({0})
    for key in loss.raw:
        use, tables = found[key]
        why = "its rows reach the loss through no product with a parameter, so they may be scored"
        found[key] = replace(use, kind="unclear", why=why), tables
    if missing := set(named) - analysis.applied:
        raise ValueError(f"uses={sorted(missing)} names no use of the table; found: {told(found)}")
    return found


def told(found: Mapping[Key, tuple[Use, frozenset[int]]]) -> str:
    """The uses found, in words."""
    return "; ".join(sorted({str(use) for use, _ in found.values()})) or "none"
