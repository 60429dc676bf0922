"""A program run again, operation by operation, with a copy of a table for each kind of its uses.

What is only the table in another form is computed for each copy; a use takes the copy of its kind. All copies are
equal, so the forward pass computes what the program does, and the compiler makes one of them again; the gradient in
each copy is that of its uses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from tied_lm.model.program import CALLS, REMAT, inner_program, scan_sizes
from tied_lm.model.values import Eqn, Key, is_integer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Copies:
    """A table, or what it has become, for each kind of use."""

    of: dict[str, Any]


@dataclass(frozen=True)
class Replay:
    """A program to run with copies.

    Attributes:
        uses: the kind of copy that each operand takes, by the place of the equation.
        carried: which carries of a scan, and which results of branches, are copies.
        instead: what to run instead of an equation, given the copies themselves.
    """

    uses: Mapping[Key, Mapping[int, str]]
    carried: Mapping[Key, Sequence[bool]]
    instead: Mapping[Key, Callable[..., Any]] = field(default_factory=dict)

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], path: Key = ()) -> list[Any]:
        """The outputs of a program, some of which may be copies."""
        env = dict(zip(jaxpr.invars, args, strict=True)) | dict(zip(jaxpr.constvars, consts, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else env[v]

        for i, eqn in enumerate(jaxpr.eqns):
            key = (*path, i)
            with eqn.ctx.manager:  # an equation may be of another mesh than what is around it
                outs = self._equation(eqn, [read(v) for v in eqn.invars], key)
            env |= zip(eqn.outvars, outs, strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Eqn, values: list[Any], key: Key) -> Sequence[Any]:
        if key in self.instead:
            return [self.instead[key](eqn, *values)]
        if key in self.uses:
            kinds = self.uses[key]
            return _bind(eqn, [one(x, kinds.get(n, "")) for n, x in enumerate(values)])
        copies = [x for x in values if isinstance(x, Copies)]
        if not copies:
            return _bind(eqn, values)
        if eqn.primitive.name in (*CALLS, *REMAT, "shard_map", "scan", "cond"):
            return self._within(eqn, values, key)
        if is_integer(eqn) or eqn.primitive.name == "stop_gradient":
            return _bind(eqn, [one(x) for x in values])
        outs = {kind: _bind(eqn, [one(x, kind) for x in values]) for kind in copies[0].of}
        made = (dict(zip(outs, each, strict=True)) for each in zip(*outs.values(), strict=True))
        moves = (jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
        return [Copies(of) if m else next(iter(of.values())) for of, m in zip(made, moves, strict=True)]

    def _within(self, eqn: Eqn, values: list[Any], key: Key) -> Sequence[Any]:
        """An equation with a program inside that copies go into."""
        name, params = eqn.primitive.name, eqn.params
        (copies, *_) = (x for x in values if isinstance(x, Copies))

        def promoted(xs: Sequence[Any]) -> tuple[Any, ...]:
            flags = zip(xs, self.carried[key], strict=True)
            return tuple(
                Copies(dict.fromkeys(copies.of, x)) if is_table and not isinstance(x, Copies) else x
                for x, is_table in flags
            )

        if name == "cond":
            branches = [
                lambda *xs, n=n, b=b: promoted(self.run(b.jaxpr, b.consts, xs, (*key, n)))
                for n, b in enumerate(params["branches"])
            ]
            return lax.switch(values[0], branches, *values[1:])
        jaxpr, consts = inner_program(eqn)
        if name in REMAT:
            inner = jax.checkpoint(
                lambda *xs: self.run(jaxpr, consts, xs, key), policy=params["policy"], prevent_cse=params["prevent_cse"]
            )
            return inner(*values)
        if name == "shard_map":
            specs = {k: params[k] for k in ("mesh", "in_specs", "out_specs", "check_vma")}
            sharded = jax.shard_map(
                lambda *xs: tuple(self.run(jaxpr, consts, xs, key)),
                axis_names=params["newly_manual_axes"],
                **specs,
            )
            return sharded(*values)
        if name == "scan":
            n, k = scan_sizes(eqn)

            def body(carry: Any, xs: Any) -> Any:
                outs = self.run(jaxpr, consts, [*values[:n], *carry, *xs], key)
                return promoted(outs[:k]), tuple(outs[k:])

            settings = {k: params[k] for k in ("length", "reverse", "unroll")}
            carry, ys = lax.scan(body, promoted(values[n : n + k]), tuple(values[n + k :]), **settings)
            return [*carry, *ys]
        return self.run(jaxpr, consts, values, key)


def one(x: Any, kind: str = "") -> Any:
    """The copy of a kind; any, if there is none."""
    return x.of.get(kind, next(iter(x.of.values()))) if isinstance(x, Copies) else x


def _bind(eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]
