"""Checks types and shapes in every call: `python -m pytest -p tests.typechecker`."""

from collections.abc import Callable
from typing import Any

import beartype
import jax
import jaxtyping
import numpy as np

# As JAX's own functions do, ours take NumPy's arrays wherever they take JAX's.
jaxtyping.Array = jax.Array | np.ndarray

# A whole number may stand for any number.
_checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its types checked; but JAX makes trees of anything of the classes that it knows as such."""
    trees = ("TrainState.__init__", "UseParts.__init__")
    return function if function.__qualname__ in trees else _checked(function)


jaxtyping.install_import_hook("tied_lm", "tests.typechecker.check")
