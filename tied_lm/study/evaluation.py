"""How good a trained state is on held-out tokens, and how sure that is."""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from tied_lm import bands
from tied_lm.data.sources import Stream
from tied_lm.study.heldout import Heldout
from tied_lm.train.step import Trainer


def evaluate(trainer: Trainer, params: PyTree, stream: Stream, tokens: int) -> dict[str, Any]:
    """Held-out loss, excess and loss by band in nats a token, each with its mean and its 95% t interval.

    The interval is one over clusters of sequences, `ci95_heldout`: it says nothing of other seeds, and `ci95` is None.
    Where the body carries a state from batch to batch, it is warm at the first token: `warm_up` tokens before it, which
    are not scored, lead to it from zeros. Perplexity, exp(loss), and bits per byte are there where they mean something;
    a band of rows that no token is of has no loss, None.

    Args:
        tokens: how many held-out tokens; no more than there are.
    """
    sums = jax.device_get(trainer.evaluate(params, stream.heldout_ahead(tokens), tokens))
    found = Heldout.of_evaluation(sums, stream.heldout_clusters(tokens))
    measures = found.measures(stream.perplexity)
    return {
        "tokens": int(found.tokens.sum()),
        "sequences": int(np.count_nonzero(np.asarray(sums.tokens).sum(axis=1))),
        "clusters": {"kind": found.kind, "count": int(found.tokens.size)},
        "warm_up": trainer.config.data.length if trainer.stateful else None,
        "loss": measures.pop("eval_loss"),
        **measures,
        "law_loss": found.law_loss(),
        "bands": {bands.NAMES[band]: found.band_loss(bands.NAMES[band]) for band in np.unique(trainer.bands)},
    }
