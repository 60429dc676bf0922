"""The split of any model's table by its uses: what lookup, scoring and all else ask of each row.

Where a Linen model calls `nn.Embed` and its `attend`, these calls are the uses (`linen`); else the uses are found in
the program of the loss (`program`), whatever library wrote it. Each is gated: the gate hands the table on as it is, and
multiplies the cotangent that passes back by a number. So loss and gradient are those of the unedited model, whatever
happens to the table on its way to the use (a cast, a box, a scan, a normalisation), and the gradient in the table is
linear in the gates a, b and c:

    G(a, b, c) = a lookup + b scoring + c other.

At 1 it is autodiff's gradient, and its derivatives are the parts: nothing is subtracted. There is one backward pass:
only what lies between a use and the parameter is done again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from tied_lm.model.arguments import check_table
from tied_lm.model.linen import gate, gradients_by_call, is_told
from tied_lm.model.program import Use, find_uses, told
from tied_lm.model.replay import replay
from tied_lm.rows import UseStats, statistics

KINDS = ("lookup", "scoring", "other")


class UseSplit(NamedTuple):
    """Gradients of the loss in one table, by use: total = lookup + scoring + other. In an untied model `total` is
    hypothetical: there lookup + other is the gradient of one matrix and scoring that of another."""

    loss: Float[Array, ""]
    lookup: Float[Array, "*L V D"]
    scoring: Float[Array, "*L V D"]
    other: Float[Array, "*L V D"]
    total: Float[Array, "*L V D"]
    aux: Any = None
    uses: tuple[Use, ...] = ()

    def stats(self) -> UseStats:
        """Statistics of the rows."""
        return UseStats(**statistics(self, UseStats._fields)).marked()


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


def split_embed_gradients(
    loss_fn: Callable[[PyTree], Any],
    params: PyTree,
    *,
    table: str,
    head: str | None = None,
    uses: Mapping[str, str] | None = None,
    has_aux: bool = False,
) -> UseSplit:
    """The split of a model written with any library of JAX, as dense tables, for study.

    Args:
        loss_fn: params -> loss, or (loss, aux) with `has_aux`; any differentiable JAX program.
        params: a pytree of arrays of floats: nested dicts, boxed (`nn.Partitioned`) or not, an NNX state, a module.
        table: path of the embedding parameter, such as "token_embed/embedding". Calls of `nn.Embed` look up and calls
            of its `attend` score. Where there are not both (or a head), uses are found in the program: rows gathered by
            ids are lookups, also as the product of a one-hot matrix; products over the features are scorings. What no
            longer has the axis of the rows, such as an L2 term, is `other`.
        head: path of the matrix that scores in an untied model: a kernel (D, V), whose gradient is transposed, or an
            embedding (V, D). All of its gradient is `scoring`.
        uses: kinds (lookup, scoring, other) of uses that cannot be told, by name of a function with a derivative of
            its own, such as {"fused_cross_entropy": "scoring"}, or by line, such as {"model.py:12": "lookup"}.

    Returns tables in the units of loss / parameter, float32 or wider; (L, V, D) if L layers of a scan have one each;
    and the uses that were found in the program; none where `nn.Embed` tells them.

    Raises:
        KeyError: there is no such parameter; the message lists the embedding tables there are.
        ValueError: nothing looks up or scores with the table; a use of it cannot be told and is not named: rows that
            are gathered and reach the loss through no product with a parameter (they may be the targets', scored), a
            product over the rows of what is not one-hot, a function with a derivative of its own, an activation that
            the table meets otherwise; `uses` names no use; or the shapes of table and head differ.
    """
    at_table, at_head = _index(params, table), None if head is None else (head, _index(params, head))

    def split(params: PyTree) -> UseSplit:
        value, parts, other_VxD, found = _by_use(loss_fn, params, at_table, table, at_head, has_aux, uses or {})
        loss, aux = value if has_aux else (value, None)
        return _split(loss, parts, other_VxD, at_table, at_head)._replace(aux=aux, uses=found)

    return jax.jit(split)(params)  # compiled once, where operations one by one would each be


def embed_loss_and_gradients(
    loss_fn: Callable[[PyTree], Any],
    params: PyTree,
    *,
    table: str,
    head: str | None = None,
    uses: Mapping[str, str] | None = None,
    has_aux: bool = False,
    rows: bool = True,
) -> tuple[Any, PyTree, UseStats | None]:
    """What `jax.value_and_grad(loss_fn, has_aux=has_aux)(params)` gives, and with `rows` the row norms of the split.

    For use in a jitted training step, where no table of the split is kept. Arguments and errors are those of
    `split_embed_gradients`.
    """
    if not rows:
        return *jax.value_and_grad(loss_fn, has_aux=has_aux)(params), None
    at_table, at_head = _index(params, table), None if head is None else (head, _index(params, head))
    value, parts, other_VxD, _ = _by_use(loss_fn, params, at_table, table, at_head, has_aux, uses or {})
    return value, parts.total, _split(value, parts, other_VxD, at_table, at_head).stats()


class _Parts(NamedTuple):
    """Gradients of some parameters, by use."""

    total: PyTree
    lookup: PyTree
    scoring: PyTree


def _by_use(
    loss_fn: Callable[[PyTree], Any],
    params: PyTree,
    index: int,
    table: str,
    head: tuple[str, int] | None,
    has_aux: bool,
    uses: Mapping[str, str],
) -> tuple[Any, _Parts, Array, tuple[Use, ...]]:
    """The value of loss_fn, its gradients by use, `other` of the table, which is one of the leaves, and its uses."""
    if wrong := set(uses.values()) - set(KINDS):
        raise ValueError(f"uses= has {sorted(wrong)}; a use is one of {', '.join(KINDS)}")
    if head is not None and head[1] == index:
        raise ValueError(f"head={head[0]!r} is the table itself: a tied model takes no head=")
    if not uses and is_told(loss_fn, params, table, head is not None):
        value, total, lookup, scoring, other = gradients_by_call(loss_fn, params, index, has_aux)
        return value, _Parts(total, lookup, scoring), other, ()
    leaves, structure = jax.tree.flatten(params)
    closed, shape = jax.make_jaxpr(lambda *leaves: loss_fn(jax.tree.unflatten(structure, leaves)), return_shape=True)(
        *leaves
    )
    found = find_uses(closed, index, leaves[index].ndim - 2, uses)
    _check_uses(found, table)
    if head is not None:
        _check_head(closed, leaves, index, head)

    def gated(params: PyTree, gates: dict[str, Array]) -> Any:
        def at_use(x: Array, use: str) -> Array:
            return gate(x, gates[use])

        outs = replay(closed.jaxpr, closed.consts, jax.tree.leaves(params), at_use, found)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    def gradients(gates: dict[str, Array]) -> tuple[list[PyTree], Any]:
        value, gradients = jax.value_and_grad(gated, has_aux=has_aux)(params, gates)
        return [gradients], value

    def with_part(inner: Callable[..., Any], use: str) -> Callable[..., Any]:
        """The derivative in the gate of a use, which is its part, beside what there is already."""

        def both(gates: dict[str, Array]) -> tuple[list[PyTree], Any]:
            one = gates[use]
            parts, moved, value = jax.jvp(lambda gate: inner(gates | {use: gate}), (one,), (one,), has_aux=True)
            return [*parts, moved[0]], value

        return both

    compute: Callable[..., Any] = gradients
    present = [kind for kind in KINDS if any(use.kind == kind for use, _ in found.values())]
    for kind in present:
        compute = with_part(compute, kind)
    (total, *by_use), value = compute(dict.fromkeys(KINDS, jnp.float32(1)))
    zeros = jax.tree.map(jnp.zeros_like, total)
    of = dict.fromkeys(KINDS, zeros) | dict(zip(present, by_use, strict=True))
    other = jax.tree.leaves(of["other"])[index]
    return value, _Parts(total, of["lookup"], of["scoring"]), other, tuple(use for use, _ in found.values())


def _check_uses(found: Mapping[Any, tuple[Use, Any]], table: str) -> None:
    """Refuse what cannot be told, and a table without lookup and scoring."""
    for use, _ in found.values():
        if use.kind == "unclear":
            raise ValueError(
                f"{use.name} of {use.shape} at {use.source} is a use of {table!r} that cannot be told: {use.why}; "
                f'name it, as in uses={{"{use.source}": "lookup"}}, or "scoring" or "other"'
            )
    if not any(use.kind in ("lookup", "scoring") for use, _ in found.values()):
        raise ValueError(
            f"nothing looks up or scores with {table!r} in the program of loss_fn; found: {told(found)}. In NNX give "
            "the state, as in nnx.split(model, nnx.Param, ...); a fused call is named by uses=; a loss of two tables "
            "takes split_table_gradients"
        )


def _check_head(closed: Any, leaves: list[Array], table: int, head: tuple[str, int]) -> None:
    """Refuse what scores nowhere."""
    path, index = head
    shape = leaves[index].shape[-2:]
    if sorted(shape) != sorted(leaves[table].shape[-2:]):
        return  # refused by its shape
    ndim, is_table = leaves[index].ndim, path.endswith("embedding")
    found = find_uses(closed, index, ndim - 2 if is_table else ndim - 1, {})
    if not any(use.kind in ("scoring", "unclear") for use, _ in found.values()):
        raise ValueError(f"head={path!r} scores nowhere in the program of loss_fn; found: {told(found)}")


def _split(value: Any, parts: _Parts, other_VxD: Array, table: int, head: tuple[str, int] | None) -> UseSplit:
    """The split of the table, which is one of the leaves; so is the head."""

    def wide(gradient: Array) -> Array:
        return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))

    total_VxD, lookup_VxD, scoring_VxD = (wide(jax.tree.leaves(part)[table]) for part in parts)
    if head is not None:
        path, leaf = head
        scoring_VxD = wide(jax.tree.leaves(parts.total)[leaf])
        if not path.endswith("embedding"):
            scoring_VxD = scoring_VxD.swapaxes(-1, -2)
        if scoring_VxD.shape != lookup_VxD.shape:
            raise ValueError(f"{path!r} gives rows of shape {scoring_VxD.shape}, but the table is {lookup_VxD.shape}")
        total_VxD = total_VxD + scoring_VxD
    return UseSplit(value, lookup_VxD, scoring_VxD, wide(other_VxD), total_VxD)


def _index(params: PyTree, path: str) -> int:
    """Where a parameter of rank 2 or more stands among the leaves."""

    def name(keys: tuple[Any, ...]) -> str:
        words = (str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in keys)
        return "/".join(word for word in words if word not in ("value", "raw_value"))  # of a box or a variable

    paths = [name(keys) for keys, _ in jax.tree.leaves_with_path(params)]
    leaves = jax.tree.leaves(params)
    if path in paths and leaves[paths.index(path)].ndim >= 2:
        return paths.index(path)
    pairs = zip(paths, leaves, strict=True)
    tables = [f"{p} {leaf.shape}" for p, leaf in pairs if p.split("/")[-1] == "embedding" and leaf.ndim >= 2]
    raise KeyError(f"there is no table {path!r}; the embedding tables are: {', '.join(tables) or 'none'}")
