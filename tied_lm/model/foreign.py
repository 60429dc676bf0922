"""The split of any model's table by its uses: what lookup, scoring and all else ask of each row.

A use is gated: it hands the table on as it is, and multiplies the cotangent that passes back by a number. So loss and
gradient are those of the unedited model, whatever happens to the table on its way to the use (a cast, a box, a scan, a
normalisation), and the gradient in the table is linear in the gates a and b:

    G(a, b) = a lookup + b scoring + other.

At a = b = 1 it is autodiff's gradient, and its derivatives are lookup and scoring. `other` is the gradient with both
uses cut off, so nothing is subtracted. There is one backward pass: only what lies between a use and the parameter is
done again, and the gradient with the uses cut off is a constant 0 unless there is some other use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from tied_lm.model.arguments import check_table
from tied_lm.rows import UseStats, statistics

# Programs traced earlier know nothing of the gates. A context of its own keeps a trace from using them again.
_trace_of = jax.make_user_context(None)


class UseSplit(NamedTuple):
    """Gradients of the loss in one table, by use: total = lookup + scoring + other. In an untied model `total` is
    hypothetical: there lookup + other is the gradient of one matrix and scoring that of another."""

    loss: Float[Array, ""]
    lookup: Float[Array, "*L V D"]
    scoring: Float[Array, "*L V D"]
    other: Float[Array, "*L V D"]
    total: Float[Array, "*L V D"]
    aux: Any = None

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
    has_aux: bool = False,
) -> UseSplit:
    """The split of a Linen model that looks up with `nn.Embed`, as dense tables, for study.

    Args:
        loss_fn: params -> loss, or (loss, aux) with `has_aux`; it applies the model, in any way.
        params: nested dicts of arrays, boxed (`nn.Partitioned`) or not.
        table: path of the embedding parameter, such as "token_embed/embedding". Lookups are calls of `nn.Embed`, of
            which there may be several, scorings are calls of its `attend`; what else reaches the table, an L2 term or
            the parameter used directly, is `other`.
        head: path of the matrix that scores in an untied model: a kernel (D, V), whose gradient is transposed, or an
            embedding (V, D). All of its gradient is `scoring`.

    Returns tables in the units of loss / parameter, float32 or wider; (L, V, D) if L layers of a scan have one each.

    Raises:
        KeyError: there is no such parameter; the message lists the embedding tables there are.
        ValueError: no `nn.Embed` looked the table up, the shapes of table and head differ, or the loss contains
            gradients in the table, as a gradient penalty does.
    """
    leaves, structure = jax.tree.flatten(params)
    paths = [table] if head is None else [table, head]
    index = [_index(params, path) for path in paths]

    def split(leaves: list[Array]) -> UseSplit:
        def loss_of(chosen: list[Array]) -> Any:
            new = dict(enumerate(leaves)) | dict(zip(index, chosen, strict=True))
            return loss_fn(jax.tree.unflatten(structure, new.values()))

        value, parts, other_VxD = _by_use(loss_of, [leaves[i] for i in index], 0, table, has_aux)
        loss, aux = value if has_aux else (value, None)
        return _split(loss, parts, other_VxD, 0, None if head is None else (head, 1))._replace(aux=aux)

    return jax.jit(split)(leaves)  # compiled once, where operations one by one would each be


def embed_loss_and_gradients(
    loss_fn: Callable[[PyTree], Any],
    params: PyTree,
    *,
    table: str,
    head: str | None = None,
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
    value, parts, other_VxD = _by_use(loss_fn, params, at_table, table, has_aux)
    return value, parts.total, _split(value, parts, other_VxD, at_table, at_head).stats()


@jax.custom_jvp
def _gate(table: Array, factor: Float[Array, ""]) -> Array:
    return table


def _gate_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
    # The table that goes on does not depend on the gate, so the forward pass does not either.
    (table, factor), (tangent, _) = primals, tangents
    if isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        return table, tangent
    return table, factor.astype(tangent.dtype) * tangent


_gate.defjvp(_gate_jvp, symbolic_zeros=True)


@contextmanager
def _gated(lookup: Callable[[Array], Array], scoring: Callable[[Array], Array], looked_up: set[str]) -> Iterator[None]:
    """Put a gate before each use of an `nn.Embed`, and note the paths of those that look up."""
    gates = {"__call__": lookup, "attend": scoring}
    ungated: dict[int, Array] = {}

    def intercept(use: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, method = context.module, context.method_name
        if not isinstance(module, nn.Embed) or method not in gates or "embedding" not in vars(module):
            return use(*args, **kwargs)
        # A subclass may call one use from within the other: the inner one counts.
        before = module.embedding
        outermost = id(module) not in ungated
        own = ungated.setdefault(id(module), before)
        object.__setattr__(module, "embedding", gates[method](own))  # modules are frozen
        if method == "__call__":
            looked_up.add("/".join(module.path))
        try:
            return use(*args, **kwargs)
        finally:
            object.__setattr__(module, "embedding", before)
            if outermost:
                del ungated[id(module)]

    with nn.intercept_methods(intercept), _trace_of(object()):
        yield


class _Parts(NamedTuple):
    """Gradients of some parameters, by use."""

    total: PyTree
    lookup: PyTree
    scoring: PyTree


def _by_use(
    loss_fn: Callable[[PyTree], Any], params: PyTree, index: int, table: str, has_aux: bool
) -> tuple[Any, _Parts, Array]:
    """The value of loss_fn, its gradients by use, and `other` of the table, which is one of the leaves."""
    looked_up: set[str] = set()
    leaves, structure = jax.tree.flatten(params)

    def gated(lookup: Array, scoring: Array, params: PyTree) -> Any:
        with _gated(partial(_gate, factor=lookup), partial(_gate, factor=scoring), looked_up):
            return loss_fn(params)

    def uses_cut_off(leaf: Array) -> Any:
        with _gated(lax.stop_gradient, lax.stop_gradient, looked_up):
            value = loss_fn(jax.tree.unflatten(structure, [*leaves[:index], leaf, *leaves[index + 1 :]]))
        return value[0] if has_aux else value

    def gradients(lookup: Array, scoring: Array) -> tuple[PyTree, Any]:
        value, gradients = jax.value_and_grad(partial(gated, lookup, scoring), has_aux=has_aux)(params)
        return gradients, value

    def with_scoring(lookup: Array) -> tuple[tuple[PyTree, PyTree], Any]:
        total, scoring, value = jax.jvp(partial(gradients, lookup), (one,), (one,), has_aux=True)
        return (total, scoring), value

    one = jnp.float32(1)
    _check_value(partial(gated, params=params))
    _check_lookups(looked_up, table)
    (total, scoring), (lookup, _), value = jax.jvp(with_scoring, (one,), (one,), has_aux=True)
    return value, _Parts(total, lookup, scoring), jax.grad(uses_cut_off)(leaves[index])


def _check_value(value: Callable[[Array, Array], Any]) -> None:
    """Trace, and refuse a value that depends on the gates."""
    try:
        jax.eval_shape(jax.vmap(value, out_axes=None), jnp.zeros(1), jnp.zeros(1))
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise ValueError("loss_fn is itself made of gradients in the table: what reaches it has no use") from error


def _check_lookups(looked_up: set[str], table: str) -> None:
    owner = "/" + table.rpartition("/")[0]
    # The params of the model may be a part of those given, so the path of the module may be the end of the table's.
    if not any(not path or owner.endswith(f"/{path}") for path in looked_up):
        seen = ", ".join(sorted(path or "the model itself" for path in looked_up)) or "nowhere"
        raise ValueError(f"no nn.Embed looked up {table!r} while loss_fn ran; nn.Embed was called at: {seen}")


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
    paths = ["/".join(str(k.key) for k in keys if hasattr(k, "key")) for keys, _ in jax.tree.leaves_with_path(params)]
    leaves = jax.tree.leaves(params)
    if path in paths and leaves[paths.index(path)].ndim >= 2:
        return paths.index(path)
    pairs = zip(paths, leaves, strict=True)
    tables = [f"{p} {leaf.shape}" for p, leaf in pairs if p.split("/")[-1] == "embedding" and leaf.ndim >= 2]
    raise KeyError(f"there is no table {path!r}; the embedding tables are: {', '.join(tables) or 'none'}")
