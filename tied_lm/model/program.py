"""The uses that a loss makes of a table, found in its program (the jaxpr of the loss).

What is computed from parameters and constants alone is still the table in another form, and is followed: casts,
transposes, blocks, normalisation. A use is where it meets an activation. A `gather` of rows by ids is a lookup, and so
is the product of a matrix that is provably one-hot; a product over the features is a scoring; what no longer has the
axis of the rows (a norm, a penalty, the mean row) is `other`. What cannot be told is `unclear`: beside what `tables`
says, a lookup whose rows may themselves be scored (`values`).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tied_lm.model.tables import rows_after, use_of
from tied_lm.model.values import (
    CUSTOM,
    PRODUCTS,
    Eqn,
    Key,
    Value,
    after_scoring,
    either,
    is_integer,
    moved,
    product_of,
    shape_facts,
    together,
    without_gradient,
)  # fmt: skip

CALLS = ("jit", "pjit", "closed_call", "core_call")
REMAT = ("remat2", "remat", "checkpoint")
LOSS: Key = (-1,)  # the place of the loss, where it is made of parameters alone
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
class Uses:
    """What was found: the uses that reach the loss, by their places; for each equation that uses the table at all, the
    kind of each operand that is the table; which carries of loops and results of branches are; and what the user has
    named of them."""

    of_loss: Mapping[Key, Use]
    operands: Mapping[Key, Mapping[int, str]]
    carried: Mapping[Key, Sequence[bool]]
    named: frozenset[str]

    def __str__(self) -> str:
        return "; ".join(sorted({str(use) for use in self.of_loss.values()})) or "none"

    def places(self, kind: str) -> list[Key]:
        return [key for key, use in self.of_loss.items() if use.kind == kind]


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


def scan_sizes(eqn: Eqn) -> tuple[int, int]:
    """How many constants and how many carries a scan has. Newer releases of JAX keep them as trees."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carries)


def _name(eqn: Eqn) -> str:
    if eqn.primitive.name not in CUSTOM:
        return eqn.primitive.name
    jaxpr, _ = inner_program(eqn, "call_jaxpr" if "call_jaxpr" in eqn.params else "fun_jaxpr")
    return str(jaxpr.debug_info.func_src_info).split(" at ")[0]


@dataclass
class Analysis:
    """A walk through a program that follows the table."""

    named: Mapping[str, str]
    heads: Set[Key] = frozenset()  # products with the matrix that scores in an untied model
    found: dict[Key, tuple[Use, frozenset[int]]] = field(default_factory=dict)  # uses, with the operands that they take
    carried: dict[Key, Sequence[bool]] = field(default_factory=dict)
    fed: set[Key] = field(default_factory=set)  # lookups that go into what is scored
    numbers: dict[Any, int] = field(default_factory=dict)  # of integers that are equal
    ids: dict[Key, int | None] = field(default_factory=dict)  # the number of the ids of each lookup
    applied: set[str] = field(default_factory=set)
    line: str = ""  # of a call of a library, whose own program may have been traced for another caller

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value], path: Key = ()) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        env |= {v: self._constant(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}

        def read(v: Any) -> Value:
            if not isinstance(v, core.Literal):
                return env[v]
            return Value("data" if jnp.ndim(v.val) else "literal", number=self._number(str(v)))

        for i, eqn in enumerate(jaxpr.eqns):
            values = [read(v) for v in eqn.invars]
            env |= zip(eqn.outvars, self._equation(eqn, values, (*path, i)), strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _number(self, *what: Any) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def _constant(self, x: Any) -> Value:
        known = isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
        if known and x.dtype.kind in "iub" and getattr(x, "is_fully_addressable", True):
            number = self._number(x.shape, np.asarray(x).tobytes())
        else:
            number = self._number(id(x))
        return Value("data" if jnp.ndim(x) else "scalar", number=number)

    def _equation(self, eqn: Eqn, values: list[Value], key: Key) -> list[Value]:
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
            outs = [either(outs) for outs in zip(*branches, strict=True)]
            self.carried[key] = [v.kind == "table" for v in outs]
            return outs
        if any(v.kind == "table" for v in values):
            outs = self._table(eqn, values, key)
        else:
            outs = self._other(eqn, values, key)
        floats = [jnp.issubdtype(v.aval.dtype, jnp.inexact) and name != "stop_gradient" for v in eqn.outvars]
        return [out if moves else without_gradient(out) for out, moves in zip(outs, floats, strict=True)]

    def _scan(self, eqn: Eqn, values: list[Value], key: Key) -> list[Value]:
        consts, carries = scan_sizes(eqn)
        fixed, carry = values[:consts], [replace(v, number=None) for v in values[consts : consts + carries]]
        xs = [
            replace(moved(v, -1), number=None if v.number is None else self._number("xs", v.number))
            for v in values[consts + carries :]
        ]
        while True:
            outs = self.run(*inner_program(eqn), [*fixed, *carry, *xs], key)
            after = [replace(either([a, b]), number=None) for a, b in zip(carry, outs, strict=False)]
            if after == carry:
                self.carried[key] = [v.kind == "table" for v in carry]
                return [*carry, *(moved(v, 1) for v in outs[carries:])]
            carry = after
            self.found = {k: v for k, v in self.found.items() if k[: len(key)] != key}

    def _other(self, eqn: Eqn, values: list[Value], key: Key) -> list[Value]:
        """An equation that the table does not go into."""
        moving = [v for v in values if v.moves]
        if key in self.heads or (eqn.primitive.name in ("mul", *PRODUCTS) and len({v.scored for v in moving}) == 2):
            self.fed |= together([v for v in moving if not v.scored]).looked_up
            out = after_scoring(values)
        else:
            out = replace(product_of(eqn, values, key), **shape_facts(eqn, values))
        outs = [out] * len(eqn.outvars)
        if eqn.primitive.name == "split":
            outs = [replace(v, origin=frozenset({(*key, n)}) if v.origin else v.origin) for n, v in enumerate(outs)]
        if is_integer(eqn) and all(v.number is not None for v in values):
            numbers = [v.number for v in values]
            outs = [
                replace(v, number=self._number(eqn.primitive.name, str(eqn.params), *numbers, n))
                for n, v in enumerate(outs)
            ]
        return outs

    def _table(self, eqn: Eqn, values: list[Value], key: Key) -> list[Value]:
        """An equation that the table goes into."""
        tables = frozenset(i for i, v in enumerate(values) if v.kind == "table")
        others = [v for i, v in enumerate(values) if i not in tables]
        kind, why = use_of(eqn, values, tables)
        gives_rows = kind == "lookup"
        name, source = _name(eqn), self.line or source_of(eqn)
        named = {name, source, f"{source} {name}"} & set(self.named)
        if named and (kind or eqn.primitive.name in CUSTOM):
            self.applied |= named
            kind, why = self.named[max(named, key=len)], ""
        met = together(values)
        if kind is None:
            rows = [values[i].rows for i in tables]
            new = rows_after(eqn, values, tables) if None not in rows else [None] * len(eqn.outvars)
            facts = shape_facts(eqn, values) if len(tables) == 1 and eqn.primitive.name == "broadcast_in_dim" else {}
            return [replace(met, kind="table", rows=r, flat=facts.get("flat", frozenset())) for r in new]
        self.found[key] = Use(kind, name, eqn.invars[min(tables)].aval.shape, source, why), tables
        met = replace(met, kind="activation", reached=met.reached | {key})
        if kind == "scoring" and gives_rows:
            met = replace(met, scored=True)
        elif kind == "scoring":
            self.fed |= together(others).looked_up
            met = after_scoring([met])
        elif kind == "lookup":
            self.ids[key] = None if eqn.primitive.name != "gather" else values[1].number
            looked_up = met.looked_up if named else met.looked_up | {key}
            met = replace(met, looked_up=looked_up, origin=frozenset({key}))
        return [met] * len(eqn.outvars)

    def doubts(self, loss: Value) -> dict[Key, str]:
        """The lookups whose rows may themselves be scored, and why."""
        scored = bool(self.heads) or any(use.kind == "scoring" for use, _ in self.found.values())
        known = {self.ids.get(key) for key in self.fed} - {None}
        apart = {key for key in loss.looked_up - self.fed if self.ids.get(key) not in known}
        paired = loss.paired & apart if loss.paired & apart else loss.paired
        doubts = dict.fromkeys(paired, "its rows are multiplied by another activation, as to score them")
        return doubts | {key: "its rows reach the loss and are not of what is scored" for key in apart if scored}


def find_uses(
    closed: core.ClosedJaxpr, table: int, rows: int, named: Mapping[str, str], heads: Set[Key] = frozenset()
) -> Uses:
    """The uses that a program makes of one of its arguments.

    Args:
        closed: its first output is the loss; its arguments are parameters.
        table, rows: which argument, and which of its axes the rows are.
        named: kinds of uses that the user names, by name of a call or line of the source.
        heads: the places of products that score with another argument.
    """
    analysis = Analysis(named, heads)
    args = [Value("parameter")] * len(closed.jaxpr.invars)
    args[table] = Value("table", frozenset({rows}))
    (loss, *_) = analysis.run(closed.jaxpr, closed.consts, args)
    found = analysis.found
    reached = {key: found[key][0] for key in found if key in loss.reached}
    for key, why in analysis.doubts(loss).items():
        reached[key] = replace(reached[key], kind="unclear", why=why)
    if loss.kind == "table":
        reached[LOSS] = Use("other", "the loss", (), "?")
    operands = {key: dict.fromkeys(tables, use.kind) for key, (use, tables) in found.items()}
    return Uses(reached, operands, analysis.carried, frozenset(analysis.applied))
