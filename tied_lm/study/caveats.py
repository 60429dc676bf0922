"""What the curves of an arm say against reading its last loss as what the model can do."""

import math

import numpy as np
from jaxtyping import Float

from tied_lm.record.reader import Run

HIGH_START = 1.0  # nats above ln V
RISE = 0.01  # nats above the best step
PLATEAU = 0.05  # nats from the unigram loss


def _mean(runs: list[Run], tag: str) -> dict[int, float]:
    """A scalar by step, as the mean over the seeds."""
    found = [run.scalars(tag) for run in runs]
    return {step: float(np.mean([values[step] for values in found])) for step in found[0]}


def _start(name: str, loss: dict[int, float], vocab_size: int) -> str | None:
    """A start that is far worse than a guess."""
    first, guess = loss[0], math.log(vocab_size)
    if first <= guess + HIGH_START:
        return None
    return (
        f"{name} starts at a held-out loss of {first:.2f} nats, far above the {guess:.2f} of a guess among all rows "
        "(ln V): its first updates undo its initial values (model.init_std)."
    )


def _rise(name: str, loss: dict[int, float], training: dict[int, float]) -> str | None:
    """A held-out loss that rises while the training loss falls."""
    best, last = min(loss, key=lambda step: loss[step]), max(loss)
    since = [step for step in training if step >= best]
    if loss[last] <= loss[best] + RISE or len(since) < 2 or training[since[-1]] >= training[since[0]]:
        return None
    return (
        f"The held-out loss of {name} rises from {loss[best]:.4f} nats at step {best:,} to {loss[last]:.4f} at the "
        f"last step, while its training loss falls from {training[since[0]]:.4f} to {training[since[-1]]:.4f}: it is "
        "compared past its best step."
    )


def _plateau(name: str, last: float, unigram: float, entropy: float | None, kind: str) -> str | None:
    """An end at the loss of the frequencies alone, where more can be known."""
    if last < unigram - PLATEAU or (entropy is not None and entropy > unigram - 2 * PLATEAU):
        return None
    where = f"within {abs(last - unigram):.4f} nats of" if last < unigram + PLATEAU else "above"
    return (
        f"{name} ends at {kind} loss of {last:.4f} nats, {where} {unigram:.4f}, that of a model which knows no "
        "more than how frequent each token is: it needs more updates or another learning rate."
    )


def caveats(
    name: str, runs: list[Run], frequencies: Float[np.ndarray, "V"], entropy: float | None, stateful: bool
) -> list[str]:
    """One sentence for each that applies, with its figures; losses in nats a token, means over the seeds.

    Args:
        frequencies: of the tokens, in training.
        entropy: the least possible loss, if it is known.
        stateful: whether the body carries a state from batch to batch.
    """
    loss, training = _mean(runs, "loss/eval"), _mean(runs, "loss/train")
    last, kind = loss[max(loss)], "a held-out"
    if entropy is not None:  # as the loss of the frequencies is: of the law, not of the tokens that are held out
        last, kind = entropy + list(_mean(runs, "loss/excess").values())[-1], "an expected"
    present = frequencies[frequencies > 0]
    unigram = float(-np.sum(present * np.log(present)))
    found = [
        _start(name, loss, frequencies.size),
        _rise(name, loss, training),
        _plateau(name, last, unigram, entropy, kind),
    ]
    if stateful:
        found.append(
            f"The body of {name} carries a state: it starts each lane of the held-out tokens with the state after the "
            f"{runs[0].config.data.length} tokens before it, which are not scored."
        )
    return [sentence for sentence in found if sentence]
