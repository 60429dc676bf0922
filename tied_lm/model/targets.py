"""Pull and push of somebody else's model: the scoring product with a copy of its table for each.

With G = dL/dlogits at the product logits = h @ S.T, pull[v] is the sum of G[t, v] h_t over the t with y_t = v, and push
that over all others. For the mean cross-entropy these are those of `split`; they are defined for any loss.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from tied_lm.model.program import CALLS, REMAT, Use, Uses, inner_program
from tied_lm.model.replay import one
from tied_lm.model.values import Eqn, Key


def scoring_product(jaxpr: Any, uses: Uses, vocab_size: int, targets: Int[Array, "*N"]) -> Key:
    """The place of the one product that scores.

    Raises:
        ValueError: there is more than one, or it is inside of a loop, or no product of a matrix (V, D) with a vector
            for each target.
    """
    places = uses.places("scoring")
    scorings = [uses.of_loss[key] for key in places]
    if len(places) != 1:
        raise ValueError(f"targets= needs one product that scores, and there are {len(places)}: {_list(scorings)}")
    (key,), (use,) = places, scorings
    for at in key[:-1]:
        eqn = jaxpr.eqns[at]
        if eqn.primitive.name not in (*CALLS, *REMAT):
            raise ValueError(f"targets= needs one product that scores; {use} is inside of a {eqn.primitive.name}")
        jaxpr, _ = inner_program(eqn)
    eqn = jaxpr.eqns[key[-1]]
    at = min(uses.operands[key])
    shape = eqn.invars[at].aval.shape
    if use.name != "dot_general" or len(shape) != 2:
        raise ValueError(f"targets= needs a product of a matrix (V, D) with hidden states; {use} is none")
    (contract, batch) = (pair[1 - at] for pair in eqn.params["dimension_numbers"])
    free = tuple(n for a, n in enumerate(eqn.invars[1 - at].aval.shape) if a not in contract)
    rows = shape[1 - eqn.params["dimension_numbers"][0][at][0]]
    if batch or rows != vocab_size or free not in (targets.shape, (prod(targets.shape),)):
        raise ValueError(
            f"targets has shape {targets.shape}, and the {use} has hidden states {free} and {rows} rows: each hidden "
            f"state needs its target, and each of the {vocab_size} rows is scored once (-1 is a target that is masked)"
        )
    return key


def _list(uses: list[Use]) -> str:
    return "; ".join(map(str, uses)) or "none"


def with_targets(targets: Int[Array, "*N"], at: int) -> Callable[..., Array]:
    """What to run instead of the product, whose operand `at` is the table."""

    def product(eqn: Eqn, *operands: Any) -> Array:
        h, table = operands[1 - at], operands[at]

        def plain(table: Array, h: Array) -> Array:
            pair = (table, h) if at == 0 else (h, table)
            return eqn.primitive.bind(*pair, **eqn.primitive.get_bind_params(eqn.params))

        score = jax.custom_vjp(lambda push, pull, h, targets: plain(push, h))
        score.defvjp(
            lambda push, pull, h, targets: (plain(push, h), (push, h, targets)), partial(_backward, plain, eqn, at)
        )
        return score(one(table, "push"), one(table, "pull"), one(h), targets)

    return product


def _backward(
    plain: Callable[[Array, Array], Array], eqn: Eqn, at: int, saved: Any, g: Array
) -> tuple[Array, Array, Array, None]:
    """Cotangents of push, pull and the hidden states, sharded as these are."""
    table, h, targets = saved
    shardings = tuple(jax.typeof(x).sharding.spec for x in (table, table, h))
    return *_anywhere(partial(_cotangents, plain, eqn, at), shardings)(table, h, targets, g), None


def _anywhere(function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """A function of arrays that are sharded in any way; the results are as they are given where shardings are types."""
    if jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return function
    return jax.sharding.auto_axes(function, out_sharding=shardings)


def _cotangents(
    plain: Callable[[Array, Array], Array], eqn: Eqn, at: int, table: Array, h: Array, targets: Array, g: Array
) -> tuple[Array, Array, Array]:
    contract, _ = eqn.params["dimension_numbers"]
    rows = 1 - contract[at][0]
    vocabulary, tokens = 0 if at == 0 else g.ndim - 1, targets.size
    g_NxV = jnp.moveaxis(g, vocabulary, -1).reshape(tokens, -1)
    h_NxD = jnp.moveaxis(h, contract[1 - at][0], -1).reshape(tokens, -1)
    ids_N = jnp.where(targets < 0, g_NxV.shape[1], targets).reshape(-1)
    at_targets_N = g_NxV.at[jnp.arange(tokens), ids_N].get(mode="fill", fill_value=0)
    wide = jnp.promote_types(table.dtype, jnp.float32)
    pull_NxD = at_targets_N[:, None].astype(wide) * h_NxD.astype(wide)
    pull_VxD = jnp.zeros((g_NxV.shape[1], h_NxD.shape[1]), wide).at[ids_N].add(pull_NxD, mode="drop")
    # Only the rest goes into products: written where it stands, it costs no second N x V array.
    others_NxV = g_NxV.at[jnp.arange(tokens), ids_N].set(0, mode="drop")
    others = jnp.moveaxis(others_NxV.reshape(jnp.moveaxis(g, vocabulary, -1).shape), -1, vocabulary)
    (push,) = jax.linear_transpose(lambda table: plain(table, h), table)(others)
    (of_others,) = jax.linear_transpose(lambda h: plain(table, h), h)(others)
    rows_NxD = jnp.moveaxis(table, rows, 0).at[ids_N].get(mode="fill", fill_value=0)
    at_targets_NxD = (at_targets_N[:, None].astype(wide) * rows_NxD.astype(wide)).astype(h.dtype)
    of_targets = at_targets_NxD.reshape(jnp.moveaxis(h, contract[1 - at][0], -1).shape)
    h_cotangent = of_others + jnp.moveaxis(of_targets, -1, contract[1 - at][0])
    return push, (pull_VxD if rows == 0 else pull_VxD.T).astype(table.dtype), h_cotangent


def count_ids(ids: Int[Array, "*N"], vocab_size: int) -> Int[Array, "V"]:
    """How often each id is there; others than those of the vocabulary are not counted."""

    def count(ids: Int[Array, "*N"]) -> Int[Array, "V"]:
        ids_N = jnp.where(ids < 0, vocab_size, ids).reshape(-1)
        return jnp.zeros(vocab_size, jnp.int32).at[ids_N].add(1, mode="drop")

    return _anywhere(count, PartitionSpec(None))(ids)
