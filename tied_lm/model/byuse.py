"""One backward pass through the program of a loss, with a copy of the table for each kind of use."""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from tied_lm.model.leaves import Leaves, Pick
from tied_lm.model.parts import UseSplit
from tied_lm.model.program import Uses, find_uses
from tied_lm.model.replay import Copies, Replay, one
from tied_lm.model.targets import count_ids, scoring_product, with_targets
from tied_lm.model.tokenrows import TokenRows, catching, gathers_of, zeros_of
from tied_lm.model.values import Key
from tied_lm.rows import TokenStats, UseStats

KINDS = ("lookup", "scoring", "other")


@dataclass(frozen=True)
class Asked:
    """The arguments of `split_embed_gradients` but for the loss and its params."""

    table: Pick
    head: Pick | None = None
    uses: Mapping[str, str] | None = None
    ids: Int[Array, "*M"] | None = None
    targets: Int[Array, "*N"] | None = None
    has_aux: bool = False


class Split(NamedTuple):
    """What `jax.value_and_grad` gives, and the split; if its lookup was kept token by token, it is 0 there."""

    value: Any
    gradients: PyTree
    by_use: UseSplit
    looked_up: TokenRows | None = None

    def stats(self) -> UseStats | TokenStats:
        """Statistics of the rows."""
        return self.by_use.stats() if self.looked_up is None else self.looked_up.stats(self.by_use)


@dataclass(frozen=True)
class _Matrix:
    """A matrix among the leaves: its name, its place among the floats, the axis of its rows, and its uses."""

    name: str
    index: int
    rows: int
    uses: Uses


def split_loss(
    loss_fn: Callable[[PyTree], Any], params: PyTree, asked: Asked, *, by_token: bool = False, local: bool = False
) -> Split:
    """The value of a loss, its gradients, and those of the table by use; errors as in `split_embed_gradients`.

    Args:
        by_token: keep the lookup token by token where that is possible and smaller: one pass over V x D less for the
            gradient, and several for its statistics.
        local: inside of `jax.shard_map`, where gradients of what all devices hold are their sums, those by use are of
            this device alone.
    """
    leaves = Leaves(params)
    floats, (index, head_index) = leaves.floats, _places(leaves, asked)
    trace = jax.make_jaxpr(lambda *floats: loss_fn(leaves.merge(floats)), return_shape=True)
    closed, shape = trace(*floats)
    axes = tuple(_varying(closed.out_avals[0]) - _varying(jax.typeof(floats[index]))) if local else ()
    if axes:
        floats = [lax.pcast(x, axes, to="varying") if i in (index, head_index) else x for i, x in enumerate(floats)]
        closed, shape = trace(*floats)
    table, head = _matrices(closed, leaves, index, head_index, asked)
    kinds, instead = [k for k in KINDS if table.uses.places(k)], {}
    operands = dict(table.uses.operands)
    if head is not None:
        operands |= {key: {**operands.get(key, {}), **of} for key, of in head.uses.operands.items()}
    if asked.targets is not None:
        scorer, vocab_size = head or table, floats[index].shape[-2]
        key = scoring_product(closed.jaxpr, scorer.uses, vocab_size, asked.targets)
        instead = {key: with_targets(asked.targets, min(scorer.uses.operands[key]))}
    at_scoring = ["push", "pull"] if instead else ["scoring"]
    gathers = gathers_of(closed, index, table.uses) if by_token else {}
    of_table = [
        k for kind in kinds for k in (at_scoring if kind == "scoring" else [kind]) if k != "lookup" or not gathers
    ]
    copies = {index: dict.fromkeys(of_table or ["other"], floats[index])}
    if head is not None:
        copies[head.index] = dict.fromkeys([*at_scoring, "other"], floats[head.index])

    def loss_of(copies: dict[int, dict[str, Array]], others: dict[int, Array], zeros: dict[Key, Array]) -> Any:
        values: dict[int, Any] = others | {i: Copies(of) for i, of in copies.items()}
        ids: dict[Key, Array] = {}
        replay = Replay(operands, _carried(table, head), instead | catching(zeros, ids))
        outs = replay.run(closed.jaxpr, closed.consts, [values[i] for i in range(len(floats))])
        value = jax.tree.unflatten(jax.tree.structure(shape), [one(x, "other") for x in outs])
        loss, aux = value if asked.has_aux else (value, None)
        return loss, (aux, ids)

    others = {i: leaf for i, leaf in enumerate(floats) if i not in copies}
    (loss, (aux, ids)), (by_copy, gradients, of_rows) = jax.value_and_grad(loss_of, (0, 1, 2), has_aux=True)(
        copies, others, zeros_of(gathers)
    )
    looked_up = TokenRows.of(ids, of_rows) if ids else None
    for i, of in by_copy.items():
        total = functools.reduce(jnp.add, of.values())
        gradients[i] = lax.psum(total, axes) if axes else total
    if looked_up is not None:
        gradients[index] = looked_up.added_to(gradients[index])
    by_use = _tables(by_copy, table, head, bool(instead))
    if asked.ids is not None and asked.targets is not None:
        vocab_size = floats[index].shape[-2]
        by_use |= {
            "input_count": count_ids(asked.ids, vocab_size),
            "target_count": count_ids(asked.targets, vocab_size),
        }
    found = UseSplit(loss, **by_use, aux=aux, uses=tuple(table.uses.of_loss.values()))
    value = (loss, aux) if asked.has_aux else loss
    return Split(value, leaves.gradients([gradients[i] for i in range(len(floats))]), found, looked_up)


def _tables(
    by_copy: Mapping[int, Mapping[str, Array]], table: _Matrix, head: _Matrix | None, has_targets: bool
) -> dict[str, Array]:
    """The fields of the split that are tables, in float32 or wider."""
    of_table = {kind: _wide(gradient) for kind, gradient in by_copy[table.index].items()}
    zeros = jnp.zeros_like(next(iter(of_table.values())))
    scorer = of_table
    if head is not None:
        turned = head.rows != by_copy[head.index]["other"].ndim - 2
        scorer = {k: _wide(g).swapaxes(-1, -2) if turned else _wide(g) for k, g in by_copy[head.index].items()}
    parts = {k: scorer.get(k, zeros) for k in ("pull", "push")} if has_targets else {}
    scoring = functools.reduce(
        jnp.add, [g for k, g in scorer.items() if head is not None or k not in ("lookup", "other")], zeros
    )
    tables = {"lookup": of_table.get("lookup", zeros), "scoring": scoring, "other": of_table.get("other", zeros)}
    return tables | {"total": tables["lookup"] + scoring + tables["other"]} | parts


def _wide(gradient: Array) -> Array:
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))


def _varying(x: Any) -> frozenset[str]:
    """The axes of `jax.shard_map` on whose devices a value may differ."""
    return frozenset(x.mat.varying if hasattr(x, "mat") else getattr(x, "vma", ()))  # it had another name


def _carried(table: _Matrix, head: _Matrix | None) -> dict[Any, list[bool]]:
    """Which carries and results hold a table or a head."""
    carried = {key: list(flags) for key, flags in table.uses.carried.items()}
    for key, flags in {} if head is None else head.uses.carried.items():
        carried[key] = [a or b for a, b in zip(flags, carried[key], strict=True)]
    return carried


def _places(leaves: Leaves, asked: Asked) -> tuple[int, int | None]:
    """Where the table and the head stand among the floats."""
    if wrong := set((asked.uses or {}).values()) - set(KINDS):
        raise ValueError(f"uses= has {sorted(wrong)}; a use is one of {', '.join(KINDS)}")
    if (asked.ids is None) != (asked.targets is None):
        raise ValueError("ids= and targets= are given together: the counts are of both")
    index = leaves.index(asked.table)
    head = None if asked.head is None else leaves.index(asked.head, "head")
    if head == index:
        raise ValueError(f"head={leaves.path(index)!r} is the table itself: a tied model takes no head=")
    return index, head


def _matrices(
    closed: Any, leaves: Leaves, index: int, head_index: int | None, asked: Asked
) -> tuple[_Matrix, _Matrix | None]:
    """The table and the head with their uses.

    Raises:
        ValueError: a use cannot be told; there is none of lookup and scoring; `uses` names none; the head scores
            nowhere; or the table scores beside it.
    """
    named, head = asked.uses or {}, None
    name, ndim = leaves.path(index), leaves.floats[index].ndim
    if head_index is not None:
        head = _head(closed, leaves, index, head_index, named)
    heads = frozenset() if head is None else frozenset(head.uses.places("scoring") + head.uses.places("unclear"))
    table = _Matrix(name, index, ndim - 2, find_uses(closed, index, ndim - 2, named, heads))
    if missing := set(named) - table.uses.named - (head.uses.named if head else set()):
        raise ValueError(f"uses={sorted(missing)} names no use of the table; found: {table.uses}")
    if head is not None and (scoring := table.uses.places("scoring")):
        raise ValueError(
            f"head={head.name!r}, but the table {name!r} scores itself: {table.uses.of_loss[scoring[0]]}; a tied model "
            "takes no head="
        )
    _check_uses(table, head)
    return table, head


def _head(closed: Any, leaves: Leaves, index: int, head: int, named: Mapping[str, str]) -> _Matrix:
    """The matrix that scores in an untied model: an embedding (V, D), or a kernel (D, V)."""
    name, shape, rows = leaves.path(head), leaves.floats[head].shape, leaves.floats[index].shape
    turned = (*shape[:-2], shape[-1], shape[-2])
    axes = [axis for axis, of in ((len(shape) - 2, shape), (len(shape) - 1, turned)) if of == rows]
    if not axes:
        given = shape if name.endswith("embedding") else turned
        raise ValueError(f"{name!r} gives rows of shape {given}, but the table is {rows}")
    found = [_Matrix(name, head, axis, find_uses(closed, head, axis, named)) for axis in axes]
    scorers = [m for kind in ("scoring", "unclear") for m in found if m.uses.places(kind)]
    if not scorers:
        raise ValueError(f"head={name!r} scores nowhere in the program of loss_fn; found: {found[0].uses}")
    return scorers[0]


def _check_uses(table: _Matrix, head: _Matrix | None) -> None:
    """Refuse what cannot be told, and a table without lookup and scoring; say so if there is only one of them."""
    name, uses = table.name, table.uses
    for key in reversed(uses.places("unclear")):
        use = uses.of_loss[key]
        raise ValueError(
            f"{use.name} of {use.shape} at {use.source} is a use of {name!r} that cannot be told: {use.why}; "
            f'name it, as in uses={{"{use.source}": "lookup"}}, or "scoring" or "other"'
        )
    if not (uses.places("lookup") or uses.places("scoring")):
        raise ValueError(
            f"nothing looks up or scores with {name!r} in the program of loss_fn; found: {uses}. In NNX give the "
            "state, as in nnx.split(model, nnx.Param, ...); a fused call is named by uses=; a loss of two tables takes "
            "split_table_gradients"
        )
    if not uses.places("lookup"):
        _warn_once(f"nothing looks {name!r} up in the program of loss_fn; found: {uses}")
    if not uses.places("scoring") and head is None:
        _warn_once(
            f"nothing scores with {name!r} in the program of loss_fn; an untied head is named by head=; found: {uses}"
        )


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=7)
