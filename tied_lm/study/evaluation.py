"""How good a trained state is on held-out tokens, and how sure that is."""

import dataclasses

import jax
import numpy as np
from jaxtyping import PyTree

from tied_lm import bands
from tied_lm.data.sources import Stream
from tied_lm.intervals import HeldoutEstimate
from tied_lm.study.heldout import ClusterCount, Heldout, Measures
from tied_lm.train import evaluation
from tied_lm.train.step import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Measures):
    """What one state makes of held-out tokens. The intervals are over clusters of sequences alone, `ci95_heldout`: they
    say nothing of other seeds, and `ci95` is None."""

    tokens: int
    sequences: int
    clusters: ClusterCount
    warm_up: int | None  # tokens before those that are scored, of a body that carries a state
    law_loss: float | None
    bands: dict[str, HeldoutEstimate | None]  # None for a band of rows that no token is of


def evaluate(trainer: Trainer, params: PyTree, stream: Stream, tokens: int) -> Evaluated:
    """The held-out loss of a state, in nats a token.

    Where the body carries a state from batch to batch, it is warm at the first token: the tokens before it lead to it
    from zeros.

    Args:
        tokens: how many held-out tokens; no more than there are.
    """
    sums = jax.device_get(evaluation.evaluate(trainer, params, stream.heldout_ahead(tokens), tokens))
    found = Heldout.of_evaluation(sums, stream.heldout_clusters(tokens))
    return Evaluated(
        **vars(found.measures(stream.perplexity)),
        tokens=int(found.tokens.sum()),
        sequences=int(np.count_nonzero(np.asarray(sums.tokens).sum(axis=1))),
        clusters=found.clusters,
        warm_up=trainer.config.data.length if trainer.stateful else None,
        law_loss=found.law_loss(),
        bands={bands.NAMES[band]: found.band_loss(bands.NAMES[band]) for band in np.unique(trainer.bands)},
    )
