"""The split of any model's table by its uses: what lookup, scoring and all else ask of each row.

The uses are found in the program of the loss (`program`), whatever library wrote it, and the program is run with a copy
of the table for each kind (`replay`). So the loss is that of the unedited model, whatever happens to the table on its
way to the use (a cast, a box, a scan, a normalisation); the gradients in the copies are the parts, from one backward
pass, and autodiff's gradient is their sum: nothing is subtracted.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from tied_lm.model.arguments import check_integers, check_table
from tied_lm.model.byuse import Asked, split_loss
from tied_lm.model.leaves import Leaves, Pick
from tied_lm.model.parts import UseParts, UseSplit, weighed
from tied_lm.rows import TokenStats, UseStats

Loss = Callable[[PyTree], Any]


def split_table_gradients(
    loss_fn: Callable[[Array, Array], Any],
    lookup_table: Float[Array, "V D"],
    scoring_table: Float[Array, "V D"] | None = None,
    *,
    has_aux: bool = False,
) -> UseSplit:
    """The split of a model without Flax, whose loss takes the table once for each use.

    Args:
        loss_fn: (lookup table, scoring table) -> loss, or (loss, aux) with `has_aux`.
        lookup_table, scoring_table: of equal shape; by default both are the first, as in a tied model.

    Returns tables in float32; `other` is 0, since `loss_fn` has no third argument.

    Raises:
        ValueError: the tables are not (V, D) arrays of floats, of equal shape.

    >>> W = jnp.array([[1., 0.], [2., 0.], [0., 1.]])
    >>> split = split_table_gradients(lambda lookup, scoring: lookup[0] @ scoring[1], W)
    >>> split.lookup.tolist(), split.scoring.tolist()
    ([[2.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    """
    scoring_table = lookup_table if scoring_table is None else scoring_table
    for name, table in (("lookup_table", lookup_table), ("scoring_table", scoring_table)):
        check_table(name, table)
    if lookup_table.shape != scoring_table.shape:
        raise ValueError(f"lookup_table is {lookup_table.shape} and scoring_table {scoring_table.shape}: not equal")
    value, gradients = jax.value_and_grad(loss_fn, (0, 1), has_aux=has_aux)(lookup_table, scoring_table)
    loss, aux = value if has_aux else (value, None)
    lookup_VxD, scoring_VxD = (g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in gradients)
    return UseSplit(loss, lookup_VxD, scoring_VxD, jnp.zeros_like(lookup_VxD), lookup_VxD + scoring_VxD, aux)


def _asked(
    table: Pick,
    head: Pick | None,
    uses: Mapping[str, str] | None,
    ids: object,
    targets: object,
    has_aux: bool,
) -> Asked:
    """The arguments, with ids as arrays."""
    arrays = {
        name: given if given is None else check_integers(name, given)
        for name, given in (("ids", ids), ("targets", targets))
    }
    return Asked(table, head, uses, **arrays, has_aux=has_aux)


def split_embed_gradients(
    loss_fn: Loss,
    params: PyTree,
    *,
    table: Pick,
    head: Pick | None = None,
    uses: Mapping[str, str] | None = None,
    ids: Int[Array, "*M"] | None = None,
    targets: Int[Array, "*N"] | None = None,
    has_aux: bool = False,
) -> UseSplit:
    """The split of a model written with any library of JAX, as dense tables, for study.

    Args:
        loss_fn: params -> loss, or (loss, aux) with `has_aux`; any differentiable JAX program.
        params: a pytree: nested dicts, boxed (`nn.Partitioned`) or not, an NNX state, an Equinox module. Leaves that
            are no floats are handed on, and have None for a gradient.
        table: path of the embedding parameter, such as "token_embed/embedding", or a function that picks it, such as
            `lambda model: model.embed.weight`. Uses are found in the program of the loss: rows gathered by ids, or by
            the product of a one-hot matrix, are lookups; products with activations over the features are scorings.
            What no longer has the axis of the rows, such as an L2 term, is `other`.
        head: path of the matrix that scores in an untied model, or a function: a kernel (D, V), whose gradient is
            transposed, or an embedding (V, D). All of its gradient is `scoring`.
        uses: kinds (lookup, scoring, other) of uses that cannot be told, by name of a function with a derivative of
            its own, such as {"fused_cross_entropy": "scoring"}, or by line, such as {"model.py:12": "lookup"}.
        ids, targets: every id that is looked up, and the target of each hidden state that is scored, with -1 where it
            is masked: for pull, push and counts. With G = dL/dlogits, pull[v] is the sum of G[t, v] h_t over the t with
            y_t = v, and push that over the others, whatever the loss.

    Returns tables in the units of loss / parameter, float32 or wider; (L, V, D) if L layers of a scan have one each;
    and the uses that were found in the program. If nothing looks the table up, or nothing scores with it, there is a
    warning, once.

    Raises:
        KeyError: there is no such parameter; the message lists the embedding tables there are.
        ValueError: nothing looks up or scores with the table; the head scores nowhere, or is the table itself, or the
            table scores beside it; a use cannot be told and is not named: rows of other ids than those that go into
            what is scored, or that are multiplied by another activation and meet no parameter after (they may be the
            targets', scored), a product over the rows of what is not one-hot, a function with a derivative of its own,
            an activation that the table meets otherwise; `uses` names no use; the shapes of table and head differ; or
            there are targets, and not one product that scores, of a hidden state for each target.
    """
    asked = _asked(table, head, uses, ids, targets, has_aux)
    leaves = Leaves(params)
    split = jax.jit(lambda floats: split_loss(loss_fn, leaves.merge(floats), asked).by_use)
    return split(leaves.floats)  # compiled once, where operations one by one would each be


def embed_loss_and_gradients(
    loss_fn: Loss,
    params: PyTree,
    *,
    table: Pick,
    head: Pick | None = None,
    uses: Mapping[str, str] | None = None,
    ids: Int[Array, "*M"] | None = None,
    targets: Int[Array, "*N"] | None = None,
    has_aux: bool = False,
    rows: bool = True,
) -> tuple[Any, PyTree, UseStats | TokenStats | None]:
    """What `jax.value_and_grad(loss_fn, has_aux=has_aux)(params)` gives, and with `rows` the row norms of the split.

    For use in a jitted training step, where no table of the split is kept. Arguments and errors are those of
    `split_embed_gradients`. Norms do not add: where gradients are averaged, take `embed_loss_and_parts`.
    """
    if not rows:
        leaves = Leaves(params)
        value, floats = jax.value_and_grad(lambda floats: loss_fn(leaves.merge(floats)), has_aux=has_aux)(leaves.floats)
        return value, leaves.gradients(floats), None
    found = split_loss(loss_fn, params, _asked(table, head, uses, ids, targets, has_aux), by_token=True)
    return found.value, found.gradients, found.stats()


def embed_loss_and_parts(
    loss_fn: Loss,
    params: PyTree,
    *,
    table: Pick,
    tokens: Int[Array, ""] | int,
    head: Pick | None = None,
    uses: Mapping[str, str] | None = None,
    ids: Int[Array, "*M"] | None = None,
    targets: Int[Array, "*N"] | None = None,
    has_aux: bool = False,
) -> tuple[Any, PyTree, UseParts]:
    """Loss and gradients as `embed_loss_and_gradients` gives them, and the parts of the split, which add up.

    For a step that averages gradients over microbatches or devices: parts are sums over tokens, so they are added up
    (`+`, a carry of `lax.scan`, `lax.psum` in `jax.shard_map`), and `stats` is called in the end. They are three tables
    (V, D) in float32, five with targets.

    Args:
        tokens: how many tokens the loss is the mean of, masked ones not among them.

    Other arguments and errors are those of `split_embed_gradients`.
    """
    asked = _asked(table, head, uses, ids, targets, has_aux)
    found = split_loss(loss_fn, params, asked, local=True)
    return found.value, found.gradients, weighed(found.by_use, jnp.asarray(tokens))
