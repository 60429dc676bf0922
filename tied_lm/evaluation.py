"""How good a trained state is on held-out tokens, and how sure that is."""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from tied_lm import bands
from tied_lm.loop import evaluation_scalars
from tied_lm.statistics import ratio
from tied_lm.streams import Stream
from tied_lm.train import Trainer


def evaluate(trainer: Trainer, params: PyTree, stream: Stream, tokens: int) -> dict[str, Any]:
    """Held-out loss, excess and loss by band in nats a token, each with its mean and 95% t interval.

    The tokens of a sequence are correlated, so the interval is one over sequences. Where the body carries a state from
    batch to batch, the sequences in one row of the batches are one, and the state is warm at the first token: `warm_up`
    tokens before it, which are not scored, lead to it from zeros. Perplexity, exp(loss), and bits per byte are there
    where they mean something; a band of rows that no token is of has no loss, None.

    Args:
        tokens: how many held-out tokens; no more than there are.
    """
    sums = jax.device_get(trainer.evaluate(params, stream.heldout_ahead(tokens), tokens))
    scalars = evaluation_scalars(sums, stream)
    nll_SxG, tokens_SxG = np.asarray(sums.nll, np.float64), np.asarray(sums.tokens, np.int64)
    excess_S = None if sums.excess is None else np.asarray(sums.excess, np.float64)
    if trainer.stateful:
        rows = trainer.config.data.batch_size
        nll_SxG, tokens_SxG = (x.reshape(-1, rows, x.shape[-1]).sum(axis=0) for x in (nll_SxG, tokens_SxG))
        excess_S = None if excess_S is None else excess_S.reshape(-1, rows).sum(axis=0)
    used = tokens_SxG.sum(axis=1) > 0
    counts_S = tokens_SxG.sum(axis=1)[used]
    loss = ratio(nll_SxG.sum(axis=1)[used], counts_S)
    return {
        "tokens": int(counts_S.sum()),
        "sequences": int(used.sum()),
        "warm_up": trainer.config.data.length if trainer.stateful else None,
        "loss": loss,
        "excess": None if excess_S is None else ratio(excess_S[used], counts_S),
        "perplexity": _exponential(loss) if stream.perplexity else None,
        "bits_per_byte": scalars.get("loss/bits_per_byte"),
        "bands": {
            bands.NAMES[band]: ratio(nll_SxG[used, band], tokens_SxG[used, band]) if tokens_SxG[:, band].any() else None
            for band in np.unique(trainer.bands)
        },
    }


def _exponential(values: dict[str, Any]) -> dict[str, Any]:
    """exp of a mean and of the ends of its interval."""
    with np.errstate(over="ignore"):
        ends = None if values["ci95"] is None else np.exp(values["ci95"]).tolist()
        return {"mean": float(np.exp(values["mean"])), "ci95": ends}
