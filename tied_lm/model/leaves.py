"""The leaves of somebody's params: which one is the table, and which ones have gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

Pick = str | Callable[[PyTree], Any]  # a path, or a function that picks a leaf


class Leaves:
    """The leaves of params, of which those that are floats have gradients.

    Integers, keys, functions and whatever else a module may hold are handed to the loss as they are.
    """

    def __init__(self, params: PyTree):
        found, self.structure = jax.tree.flatten(params)
        self.paths = [_path(keys) for keys, _ in jax.tree.leaves_with_path(params)]
        self.all = found
        self.at = [i for i, leaf in enumerate(found) if _is_float(leaf)]

    @property
    def floats(self) -> list[Array]:
        return [self.all[i] for i in self.at]

    def merge(self, floats: Sequence[Any]) -> PyTree:
        """Params with other floats."""
        return self._with(self.all, floats)

    def gradients(self, floats: Sequence[Any]) -> PyTree:
        """The tree of gradients: None where there is none."""
        return self._with([None] * len(self.all), floats)

    def _with(self, leaves: list[Any], floats: Sequence[Any]) -> PyTree:
        new = dict(zip(self.at, floats, strict=True))
        return jax.tree.unflatten(self.structure, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

    def index(self, pick: Pick, argument: str = "table") -> int:
        """Where a parameter of rank 2 or more stands among the floats.

        Raises:
            KeyError: there is none of this path; the message lists the tables there are.
            ValueError: the function picks no such leaf.
        """
        if callable(pick):
            numbered = jax.tree.unflatten(self.structure, range(len(self.all)))
            picked = jax.tree.leaves(pick(numbered))
            if len(picked) == 1 and picked[0] in self.at and self.all[picked[0]].ndim >= 2:
                return self.at.index(picked[0])
            raise ValueError(f"{argument}= picks {len(picked)} leaves, not one array (V, D) of floats of the params")
        matches = [i for i in self.at if self.paths[i] == pick and self.all[i].ndim >= 2]
        if matches:
            return self.at.index(matches[0])
        matrices = [i for i in self.at if self.all[i].ndim >= 2]
        named = [i for i in matrices if self.paths[i].split("/")[-1].startswith("embedding")] or matrices
        tables = ", ".join(f"{self.paths[i]} {self.all[i].shape}" for i in named)
        raise KeyError(f"there is no {argument} {pick!r}; the embedding tables are: {tables or 'none'}")

    def path(self, index: int) -> str:
        return self.paths[self.at[index]]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, float | complex) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))


def _path(keys: tuple[Any, ...]) -> str:
    words = (str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in keys)
    return "/".join(word for word in words if word not in ("value", "raw_value"))  # of a box or a variable
