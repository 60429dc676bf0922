"""The uses of a table that Linen names: calls of `nn.Embed` look up, calls of its `attend` score.

Where a model says so itself, nothing need be found in its program, and no use is unclear. What else reaches the table
is `other`, the gradient with both uses cut off.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

# Programs traced earlier know nothing of the gates. A context of its own keeps a trace from using them again.
_trace_of = jax.make_user_context(None)

Calls = dict[str, set[str]]  # paths of the modules that were called, by method


@jax.custom_jvp
def gate(table: Array, factor: Float[Array, ""]) -> Array:
    """The table as it is; the cotangent that passes back is multiplied by a factor."""
    return table


def _gate_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
    # The table that goes on does not depend on the gate, so the forward pass does not either.
    (table, factor), (tangent, _) = primals, tangents
    if isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        return table, tangent
    return table, factor.astype(tangent.dtype) * tangent


gate.defjvp(_gate_jvp, symbolic_zeros=True)


@contextmanager
def _gated(lookup: Callable[[Array], Array], scoring: Callable[[Array], Array], calls: Calls) -> Iterator[None]:
    """Put a gate before each use of an `nn.Embed`, and note the paths of those that are called."""
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
        calls.setdefault(method, set()).add("/".join(module.path))
        try:
            return use(*args, **kwargs)
        finally:
            object.__setattr__(module, "embedding", before)
            if outermost:
                del ungated[id(module)]

    with nn.intercept_methods(intercept), _trace_of(object()):
        yield


def is_told(loss_fn: Callable[[PyTree], Any], params: PyTree, table: str, has_head: bool) -> bool:
    """Whether `nn.Embed` looks the table up and, without a head, `attend` scores with it, so that Linen tells the uses.

    Raises:
        ValueError: the loss contains gradients in the table, as a gradient penalty does.
    """
    calls: Calls = {}

    def gated(lookup: Array, scoring: Array) -> Any:
        with _gated(partial(gate, factor=lookup), partial(gate, factor=scoring), calls):
            return loss_fn(params)

    problem = None
    try:
        # A value that depends on the gates is one in which there are gradients.
        jax.eval_shape(jax.vmap(gated, out_axes=None), jnp.zeros(1), jnp.zeros(1))
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        problem = error
    owner = "/" + table.rpartition("/")[0]
    # The params of the model may be a part of those given, so the path of the module may be the end of the table's.
    used = {method for method, paths in calls.items() if any(not p or owner.endswith(f"/{p}") for p in paths)}
    told = "__call__" in used and (has_head or "attend" in used)
    if told and problem is not None:
        raise ValueError("loss_fn is itself made of gradients in the table: what reaches it has no use") from problem
    return told


def gradients_by_call(
    loss_fn: Callable[[PyTree], Any], params: PyTree, index: int, has_aux: bool
) -> tuple[Any, PyTree, PyTree, PyTree, Array]:
    """The value of loss_fn, its gradients in all, by lookup and by scoring, and `other` of the table, a leaf."""
    leaves, structure = jax.tree.flatten(params)

    def gated(lookup: Array, scoring: Array, params: PyTree) -> Any:
        with _gated(partial(gate, factor=lookup), partial(gate, factor=scoring), {}):
            return loss_fn(params)

    def uses_cut_off(leaf: Array) -> Any:
        with _gated(lax.stop_gradient, lax.stop_gradient, {}):
            value = loss_fn(jax.tree.unflatten(structure, [*leaves[:index], leaf, *leaves[index + 1 :]]))
        return value[0] if has_aux else value

    def gradients(lookup: Array, scoring: Array) -> tuple[PyTree, Any]:
        value, gradients = jax.value_and_grad(partial(gated, lookup, scoring), has_aux=has_aux)(params)
        return gradients, value

    def with_scoring(lookup: Array) -> tuple[tuple[PyTree, PyTree], Any]:
        total, scoring, value = jax.jvp(partial(gradients, lookup), (one,), (one,), has_aux=True)
        return (total, scoring), value

    one = jnp.float32(1)
    (total, scoring), (lookup, _), value = jax.jvp(with_scoring, (one,), (one,), has_aux=True)
    return value, total, lookup, scoring, jax.grad(uses_cut_off)(leaves[index])
