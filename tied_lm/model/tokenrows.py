"""Rows of a table that tokens look up, kept token by token: no (V, D) table need be made of them."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, Float, Int, Shaped

from tied_lm.model.parts import UseSplit
from tied_lm.model.program import CALLS, Uses, inner_program
from tied_lm.model.replay import one
from tied_lm.model.values import Eqn, Key
from tied_lm.rows import TokenStats, UseStats


class Holders(NamedTuple):
    """Of some tokens one for each row, which holds the row's sum over all of them."""

    of_row: Int[Array, "V"]  # -1 where there is none
    of_token: Int[Array, "M"]

    @classmethod
    def of(cls, ids_M: Int[Array, "M"], rows: int) -> "Holders":
        """Ids from `rows` on are of no row."""
        of_row = jnp.full(rows, -1).at[ids_M].max(jnp.arange(ids_M.size), mode="drop")
        return cls(of_row, of_row.at[ids_M].get(mode="fill", fill_value=ids_M.size))

    def spread(self, at_tokens: Shaped[Array, "M"], elsewhere: Shaped[Array, "V"]) -> Shaped[Array, "V"]:
        """Values by row, of those at their holders and of those of rows without one."""
        return jnp.where(self.of_row < 0, elsewhere, at_tokens[self.of_row])


def gathers_of(closed: core.ClosedJaxpr, table: int, uses: Uses) -> dict[Key, Eqn]:
    """The places where rows of the table itself are gathered, if nothing else looks it up in a program, nor more rows
    than it has; else none."""
    found: dict[Key, Eqn] = {}
    _find(closed.jaxpr, closed.jaxpr.invars[table], uses, (), found)
    tokens = sum(_tokens(eqn) for eqn in found.values())
    return found if set(found) == set(uses.places("lookup")) and tokens < closed.in_avals[table].shape[0] else {}


def _find(jaxpr: core.Jaxpr, table: Any, uses: Uses, path: Key, found: dict[Key, Eqn]) -> None:
    for i, eqn in enumerate(jaxpr.eqns):
        key = (*path, i)
        if eqn.primitive.name in CALLS:
            inner, _ = inner_program(eqn)
            for n, v in enumerate(eqn.invars):
                if v is table:
                    _find(inner, inner.invars[n], uses, key, found)
        elif key in uses.of_loss and eqn.invars[0] is table and _takes_rows(eqn):
            found[key] = eqn


def _takes_rows(eqn: Eqn) -> bool:
    """Whether it gathers whole rows of a table in float32 or wider."""
    aval = eqn.invars[0].aval
    if eqn.primitive.name != "gather" or aval.ndim != 2 or aval.dtype != jnp.promote_types(aval.dtype, jnp.float32):
        return False
    numbers, last = eqn.params["dimension_numbers"], eqn.outvars[0].aval.ndim - 1
    return (
        (numbers.collapsed_slice_dims, numbers.start_index_map, numbers.offset_dims) == ((0,), (0,), (last,))
        and tuple(eqn.params["slice_sizes"]) == (1, aval.shape[1])
        and not numbers.operand_batching_dims
    )


def zeros_of(gathers: Mapping[Key, Eqn]) -> dict[Key, Array]:
    """Zeros of the shapes of what is gathered."""
    return {key: jnp.zeros(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype) for key, eqn in gathers.items()}


def _tokens(eqn: Eqn) -> int:
    return prod(eqn.outvars[0].aval.shape[:-1])


def catching(zeros: Mapping[Key, Array], ids: dict[Key, Int[Array, "M"]]) -> dict[Key, Callable[..., Array]]:
    """What to run instead of gathers, so that the gradients in some zeros are those in the rows, and none is in the
    table; `ids` is filled."""

    def gather(key: Key, eqn: Eqn, table: Any, indices: Int[Array, "*M 1"]) -> Array:
        plain, params = lax.stop_gradient(one(table)), eqn.primitive.get_bind_params(eqn.params)
        vocab_size, ids_M = plain.shape[0], indices.reshape(-1).astype(jnp.int32)
        clips = eqn.params["mode"] == lax.GatherScatterMode.CLIP
        ids[key] = jnp.clip(ids_M, 0, vocab_size - 1) if clips else jnp.where(ids_M < 0, vocab_size, ids_M)
        return _caught(eqn.primitive.bind(plain, indices, **params), zeros[key])

    return {key: partial(gather, key) for key in zeros}


@jax.custom_vjp
def _caught(rows: Float[Array, "*M D"], zeros: Float[Array, "*M D"]) -> Float[Array, "*M D"]:
    return rows


_caught.defvjp(lambda rows, _: (rows, None), lambda _, cotangent: (cotangent, cotangent))


class TokenRows(NamedTuple):
    """The gradient in the looked-up rows, token by token. Ids from V on are of no row."""

    ids: Int[Array, "M"]
    rows: Float[Array, "M D"]

    @classmethod
    def of(cls, ids: Mapping[Key, Int[Array, "m"]], gradients: Mapping[Key, Float[Array, "*m D"]]) -> "TokenRows":
        """Those of several gathers."""
        rows = [gradients[key].reshape(-1, gradients[key].shape[-1]) for key in ids]
        return cls(jnp.concatenate([*ids.values()]), jnp.concatenate(rows))

    def added_to(self, table_VxD: Float[Array, "V D"]) -> Float[Array, "V D"]:
        return table_VxD.at[self.ids].add(self.rows, mode="drop")

    def stats(self, rest: UseSplit) -> UseStats | TokenStats:
        """Statistics of the rows of a split whose lookup these are. On all rows but these tokens' it is 0."""
        holders = Holders.of(self.ids, rest.total.shape[0])
        lookup_MxD = jnp.zeros_like(self.rows).at[holders.of_token].add(self.rows, mode="drop")
        of_vocabulary = {n: x for n in VARYING if (x := getattr(rest, n)) is not None}
        at_tokens = rest._replace(**{n: x.at[self.ids].get(mode="clip") for n, x in of_vocabulary.items()})
        at_tokens = at_tokens._replace(lookup=lookup_MxD, total=at_tokens.total + lookup_MxD)
        found = zip(at_tokens.stats(), rest.stats(), strict=True)
        return type(rest.stats())(*(holders.spread(at, elsewhere) for at, elsewhere in found))


VARYING = ("scoring", "other", "total", "pull", "push", "input_count", "target_count")
