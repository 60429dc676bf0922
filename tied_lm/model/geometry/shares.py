"""The share of the lookup in the gradient, as this project defines it and as it has been measured elsewhere."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Int, PyTree

from tied_lm.model.arguments import check_ids
from tied_lm.model.embedding import VocabularyModel
from tied_lm.model.geometry.arrays import AnyArray
from tied_lm.model.split import backward, tables


class Shares(NamedTuple):
    """Norms of one batch's gradient, and the lookup's share in them; NaN for 0 / 0.

    The lookup before the scatter is the gradient in the looked-up vectors, over (B, L, D) activations. Repeated tokens
    are not added up there, so it is no norm of anything that a parameter receives: it is here to compare with what was
    published (Lopardo et al. 2026, arXiv:2603.26663). In an untied model all shares are hypothetical.
    """

    lookup: float  # Frobenius norm of the (V, D) table
    scoring: float
    lookup_before_scatter: float
    squared: float  # |lookup|^2 / (|lookup|^2 + |scoring|^2): what is called the share everywhere else here
    unsquared: float  # |lookup| / (|lookup| + |scoring|)
    squared_before_scatter: float  # the same two with the lookup before the scatter
    unsquared_before_scatter: float


def measure_shares(
    model: VocabularyModel,
    params: PyTree,
    inputs: Int[AnyArray, "*N"],
    targets: Int[AnyArray, "*N"],
    *,
    mask: Bool[AnyArray, "*N"] | None = None,
) -> Shares:
    """Shares of one batch; arguments and errors as in `loss_and_gradients`."""
    inputs, targets, mask = check_ids(model.vocab_size, inputs, targets, mask)
    b = backward(model, params, inputs, targets, mask=mask)
    lookup, scoring, before = (float(jnp.linalg.norm(x)) for x in (tables(b).lookup, b.scoring.table, b.lookup))
    return Shares(
        lookup,
        scoring,
        before,
        share(lookup**2, scoring**2),
        share(lookup, scoring),
        share(before**2, scoring**2),
        share(before, scoring),
    )


def share(part: float, other: float) -> float:
    """part / (part + other), NaN for 0 / 0."""
    return part / (part + other) if part + other else float("nan")
