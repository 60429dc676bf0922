"""A program run again, operation by operation, with a gate before each use of a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jaxtyping import Array

from tied_lm.model.program import REMAT, Eqn, Key, Use, inner_program, scan_sizes

Gate = Callable[[Array, str], Array]


def replay(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    gate: Gate,
    found: Mapping[Key, tuple[Use, frozenset[int]]],
    path: Key = (),
) -> list[Any]:
    """The outputs of a program, run with a gate before each use that was found in it."""
    inside = {key[: n + 1] for key in found for n in range(len(key))}
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True)) | dict(zip(jaxpr.constvars, consts, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    def gated(x: Any, key: Key, operand: int) -> Any:
        use, operands = found.get(key, (None, ()))
        return gate(x, use.kind) if use and operand in operands else x

    for i, eqn in enumerate(jaxpr.eqns):
        key = (*path, i)
        values = [gated(read(v), key, n) for n, v in enumerate(eqn.invars)]
        if key in inside and key not in found:
            outs = _within(eqn, values, lambda j, c, xs, to: replay(j, c, xs, gate, found, to), key)
        else:
            outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            outs = outs if eqn.primitive.multiple_results else [outs]
        env |= zip(eqn.outvars, outs, strict=True)
    return [gated(read(v), (*path, -1), n) for n, v in enumerate(jaxpr.outvars)]


def _within(eqn: Eqn, values: list[Any], run: Callable[..., list[Any]], key: Key) -> Sequence[Any]:
    """An equation with a program inside that uses the table."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        branches = [
            lambda *xs, n=n, b=b: tuple(run(b.jaxpr, b.consts, xs, (*key, n))) for n, b in enumerate(params["branches"])
        ]
        return lax.switch(values[0], branches, *values[1:])
    jaxpr, consts = inner_program(eqn)
    if name in REMAT:
        inner = jax.checkpoint(
            lambda *xs: run(jaxpr, consts, xs, key), policy=params["policy"], prevent_cse=params["prevent_cse"]
        )
        return inner(*values)
    if name == "shard_map":
        specs = {k: params[k] for k in ("mesh", "in_specs", "out_specs", "check_vma")}
        sharded = jax.shard_map(
            lambda *xs: tuple(run(jaxpr, consts, xs, key)), axis_names=frozenset(params["manual_axes"]), **specs
        )
        return sharded(*values)
    if name == "scan":
        n, k = scan_sizes(eqn)

        def body(carry: Any, xs: Any) -> Any:
            outs = run(jaxpr, consts, [*values[:n], *carry, *xs], key)
            return tuple(outs[:k]), tuple(outs[k:])

        carry, ys = lax.scan(
            body,
            tuple(values[n : n + k]),
            tuple(values[n + k :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]
    return run(jaxpr, consts, values, key)
