"""The split of any model's table by its uses: what lookup, scoring and all else ask of each row.

A use is gated: it hands the table on as it is, and lets a cotangent pass back only where the gate is open. So the loss
and its gradient stay those of the unedited model, whatever happens to the table on its way to the use (a cast, a box, a
scan, a normalisation), and with G(lookup open, scoring open) the gradient in the table,

    total = G(1, 1)    other = G(0, 0)    lookup = G(1, 0) - other    scoring = G(0, 1) - other.

The four are one backward pass: under `vmap` over the gates only what lies between a use and the parameter is done four
times, and XLA fuses that with the norms.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from tied_lm.gradients import row_cosine, row_norm

LOOKUP_OPEN = (True, True, False, False)
SCORING_OPEN = (True, False, True, False)

# Programs traced earlier know nothing of the gates. A context of its own keeps a trace from using them again.
_trace_of = jax.make_user_context(None)


class UseStats(NamedTuple):
    """L2 norms of the rows of the tables of a `UseSplit`, and the cosine of lookup and scoring, 0 where either is 0."""

    lookup: Float[Array, "*L V"]
    scoring: Float[Array, "*L V"]
    other: Float[Array, "*L V"]
    total: Float[Array, "*L V"]
    cosine: Float[Array, "*L V"]


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
        """Norms and cosines of the rows."""
        return use_stats(self.lookup, self.scoring, self.other)


def use_stats(
    lookup_VxD: Float[Array, "*L V D"],
    scoring_VxD: Float[Array, "*L V D"],
    other_VxD: Float[Array, "*L V D"] | None = None,
) -> UseStats:
    """Norms and cosines of the rows of gradients by use."""
    other_VxD = jnp.zeros_like(lookup_VxD) if other_VxD is None else other_VxD
    return UseStats(
        row_norm(lookup_VxD),
        row_norm(scoring_VxD),
        row_norm(other_VxD),
        row_norm(lookup_VxD + scoring_VxD + other_VxD),
        row_cosine(lookup_VxD, scoring_VxD),
    )


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
        scoring_table: by default the lookup table, as in a tied model.

    Returns tables in float32; `other` is 0, since `loss_fn` has no third argument.

    >>> W = jnp.array([[1., 0.], [2., 0.], [0., 1.]])
    >>> split = split_table_gradients(lambda lookup, scoring: lookup[0] @ scoring[1], W)
    >>> split.lookup.tolist(), split.scoring.tolist()
    ([[2.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    """
    scoring_table = lookup_table if scoring_table is None else scoring_table
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
    index = {"table": _index(params, table)} | ({} if head is None else {"head": _index(params, head)})

    def split(leaves: list[Array]) -> UseSplit:
        def loss_of(chosen: dict[str, Array]) -> Any:
            new = list(leaves)
            for name, leaf in chosen.items():
                new[index[name]] = leaf
            return loss_fn(jax.tree.unflatten(structure, new))

        chosen = {name: leaves[i] for name, i in index.items()}
        value, gradients = _by_gates(loss_of, chosen, table, has_aux)
        loss, aux = value if has_aux else (value, None)
        return UseSplit(loss, *_tables(gradients["table"], gradients.get("head"), head), aux)

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
    at_table, at_head = _index(params, table), None if head is None else _index(params, head)
    value, gradients = _by_gates(loss_fn, params, table, has_aux)
    leaves = jax.tree.leaves(gradients)
    lookup_VxD, scoring_VxD, other_VxD, _ = _tables(
        leaves[at_table], None if at_head is None else leaves[at_head], head
    )
    return value, jax.tree.map(lambda g: g[0], gradients), use_stats(lookup_VxD, scoring_VxD, other_VxD)


@jax.custom_jvp
def _gate(table: Array, is_open: Bool[Array, ""]) -> Array:
    return table


@_gate.defjvp
def _gate_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    # The table itself does not depend on the gate, so the forward pass is done once.
    return primals[0], jnp.where(primals[1], tangents[0], jnp.zeros_like(tangents[0]))


@contextmanager
def _gated(lookup_open: Bool[Array, ""], scoring_open: Bool[Array, ""], looked_up: set[str]) -> Iterator[None]:
    """Gate each use of an `nn.Embed`, and note the paths of those that look up."""
    gates = {"__call__": lookup_open, "attend": scoring_open}
    ungated: dict[int, Array] = {}

    def intercept(use: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, method = context.module, context.method_name
        if not isinstance(module, nn.Embed) or method not in gates or "embedding" not in vars(module):
            return use(*args, **kwargs)
        # A subclass may call one use from within the other: the inner one counts.
        before = module.embedding
        outermost = id(module) not in ungated
        own = ungated.setdefault(id(module), before)
        object.__setattr__(module, "embedding", _gate(own, gates[method]))  # modules are frozen
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


def _by_gates(loss_fn: Callable[[PyTree], Any], params: PyTree, table: str, has_aux: bool) -> tuple[Any, PyTree]:
    """The value of loss_fn, and its gradients for each setting of the gates, along a new first axis."""
    looked_up: set[str] = set()

    def value_and_gradients(lookup_open: Array, scoring_open: Array) -> tuple[Any, PyTree]:
        with _gated(lookup_open, scoring_open, looked_up):
            return jax.value_and_grad(loss_fn, has_aux=has_aux)(params)

    by_gate = jax.vmap(value_and_gradients, out_axes=(None, 0))
    try:
        found = by_gate(jnp.array(LOOKUP_OPEN), jnp.array(SCORING_OPEN))
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise ValueError("loss_fn is itself made of gradients in the table: what reaches it has no use") from error
    owner = "/" + table.rpartition("/")[0]
    # The params of the model may be a part of those given, so the path of the module may be the end of the table's.
    if not any(owner.endswith(f"/{path}") for path in looked_up):
        seen = ", ".join(sorted(path or "the model itself" for path in looked_up)) or "nowhere"
        raise ValueError(f"no nn.Embed looked up {table!r} while loss_fn ran; nn.Embed was called at: {seen}")
    return found


def _tables(
    table_4xVxD: Float[Array, "4 *L V D"], head: Float[Array, "4 *L D V"] | None, head_path: str | None
) -> tuple[Array, Array, Array, Array]:
    """Lookup, scoring, other and total from the gradients for each setting of the gates."""
    table_4xVxD = table_4xVxD.astype(jnp.promote_types(table_4xVxD.dtype, jnp.float32))
    total_VxD, lookup_VxD, scoring_VxD, other_VxD = table_4xVxD
    lookup_VxD = lookup_VxD - other_VxD
    if head is None:
        return lookup_VxD, scoring_VxD - other_VxD, other_VxD, total_VxD
    head_VxD = head[0].astype(table_4xVxD.dtype)
    if not str(head_path).endswith("embedding"):
        head_VxD = head_VxD.swapaxes(-1, -2)
    if head_VxD.shape != total_VxD.shape:
        raise ValueError(f"{head_path!r} of shape {head.shape[1:]} does not score a table of shape {total_VxD.shape}")
    return lookup_VxD, head_VxD, other_VxD, total_VxD + head_VxD


def _index(params: PyTree, path: str) -> int:
    """Where a parameter of rank 2 or more stands among the leaves."""
    paths = ["/".join(str(k.key) for k in keys if hasattr(k, "key")) for keys, _ in jax.tree.leaves_with_path(params)]
    leaves = jax.tree.leaves(params)
    if path in paths and leaves[paths.index(path)].ndim >= 2:
        return paths.index(path)
    pairs = zip(paths, leaves, strict=True)
    tables = [f"{p} {leaf.shape}" for p, leaf in pairs if p.split("/")[-1] == "embedding" and leaf.ndim >= 2]
    raise KeyError(f"there is no table {path!r}; the embedding tables are: {', '.join(tables) or 'none'}")
