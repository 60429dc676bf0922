"""The held-out loss of some runs by cluster of held-out tokens."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tied_lm.bands import NAMES
from tied_lm.data.clusters import Clusters
from tied_lm.intervals import Crossed, Ends, HeldoutEstimate
from tied_lm.record.reader import Run
from tied_lm.record.slots import Evaluation

FIELDS = ("nll_", "tokens_", "excess", "law", "bytes")  # how the names begin
FEWEST_SEQUENCES = 50  # with a token of a band, for an interval of its loss


@dataclasses.dataclass(frozen=True)
class ClusterCount:
    """How many clusters there are, and what each is, see `clusters.Clusters`."""

    kind: str
    count: int

    def __str__(self) -> str:
        """What an interval over the held-out tokens is over."""
        kind = {"block": "block of windows", "lane": "lane of windows"}.get(self.kind, self.kind)
        first, *rest = kind.split(" ")
        words = " ".join([first + ("" if self.count == 1 else "s"), *rest])
        return f"{self.count:,} held-out {words}"


@dataclasses.dataclass(frozen=True)
class Measures:
    """A held-out loss in nats a token, and what it amounts to where that means something."""

    eval_loss: HeldoutEstimate
    excess: HeldoutEstimate | None  # divergence from the true law, nats a token
    perplexity: HeldoutEstimate | None = None  # exp(loss)
    bits_per_byte: HeldoutEstimate | None = None


@dataclasses.dataclass(frozen=True)
class Heldout:
    """Sums over the tokens of each cluster (J), of all bands and by band, for each run (R) where the runs differ."""

    kind: str  # what a cluster is, see `clusters.Clusters`
    tokens: Int[np.ndarray, "J"]
    nll: Float[np.ndarray, "R J"]
    band_tokens: dict[str, Int[np.ndarray, "J"]]  # of the bands that have a token
    band_nll: dict[str, Float[np.ndarray, "R J"]]
    band_sequences: dict[str, int]  # with a token of the band
    excess: Float[np.ndarray, "R J"] | None
    law: Float[np.ndarray, "J"] | None
    bytes: Int[np.ndarray, "J"] | None

    @classmethod
    def of(cls, evaluations: Sequence[dict[str, Float[np.ndarray, "S"]]], clusters: Clusters) -> "Heldout":
        """Of the values by sequence that the runs have, each as `Evaluation.by_sequence` gives them."""
        first = evaluations[0]
        bands = [name for name in NAMES if f"nll_{name}" in first and np.any(first[f"tokens_{name}"])]
        used_S = np.sum([first[f"tokens_{name}"] for name in bands], axis=0) > 0
        ids, number_S = np.unique(clusters.ids[used_S], return_inverse=True)

        def total(name: str) -> Float[np.ndarray, "R J"]:
            values = [np.asarray(one[name], np.float64)[used_S] for one in evaluations]
            return np.array([np.bincount(number_S, of_run, ids.size) for of_run in values])

        band_nll = {name: total(f"nll_{name}") for name in bands}
        band_tokens = {name: total(f"tokens_{name}")[0].astype(np.int64) for name in bands}
        return cls(
            clusters.kind,
            np.sum(list(band_tokens.values()), axis=0),
            np.sum(list(band_nll.values()), axis=0),
            band_tokens,
            band_nll,
            {name: int(np.count_nonzero(first[f"tokens_{name}"])) for name in bands},
            total("excess") if "excess" in first else None,
            total("law")[0] if "law" in first else None,
            total("bytes")[0].astype(np.int64) if "bytes" in first else None,
        )

    @classmethod
    def of_runs(cls, runs: Sequence[Run], kind: str, which: slice = slice(None)) -> dict[int, "Heldout"]:
        """Of the runs of an arm, by the step of the evaluation.

        Args:
            kind: what a cluster is.
            which: of the evaluations, by their number.
        """
        found: list[dict[str, Any]] = []
        for run in runs:
            with run.heldout as opened:
                found.append({str(name): values.values for name, values in opened.isel(step=which).variables.items()})
        clusters = Clusters(kind, found[0].pop("cluster"))
        return {
            int(step): cls.of([{n: v[k] for n, v in one.items() if n.startswith(FIELDS)} for one in found], clusters)
            for k, step in enumerate(found[0]["step"])
        }

    @classmethod
    def of_evaluation(cls, evaluation: Evaluation, clusters: Clusters) -> "Heldout":
        """Of one state."""
        return cls.of([{k: np.asarray(v) for k, v in evaluation.by_sequence().items()}], clusters)

    def loss(self) -> Crossed:
        """Nats a token."""
        return Crossed.of(self.nll, self.tokens)

    def less(self, baseline: "Heldout") -> Crossed:
        """The difference of losses, paired by seed and by cluster: what they share cancels."""
        return Crossed.of(self.nll - baseline.nll, self.tokens)

    def law_loss(self) -> float | None:
        """The loss of the true law on the same tokens, nats a token."""
        return None if self.law is None else float(self.law.sum() / self.tokens.sum())

    @property
    def clusters(self) -> ClusterCount:
        return ClusterCount(self.kind, int(self.tokens.size))

    def measures(self, perplexity: bool) -> Measures:
        """What the loss amounts to.

        Args:
            perplexity: whether there is one.
        """
        loss = self.loss().estimate(0.0)
        bits = None if self.bytes is None else Crossed.of(self.nll / math.log(2), self.bytes).estimate(0.0)
        excess = None if self.excess is None else Crossed.of(self.excess, self.tokens).estimate(0.0)
        return Measures(loss, excess, _exponential(loss) if perplexity else None, bits)

    def band_loss(self, name: str) -> HeldoutEstimate | None:
        """The loss on the tokens of a band, nats a token; None without any. Few sequences give no interval."""
        if name not in self.band_nll:
            return None
        found = Crossed.of(self.band_nll[name], self.band_tokens[name]).estimate(0.0)
        few = self.band_sequences[name] < FEWEST_SEQUENCES
        return dataclasses.replace(found, ci95=None, ci95_heldout=None) if few else found


def _exponential(estimate: HeldoutEstimate) -> HeldoutEstimate | None:
    """exp of a mean, of the ends of its intervals and of the values; None where a float does not hold it."""

    def ends(of: Ends | None) -> Ends | None:
        found = of and (float(np.exp(of[0])), float(np.exp(of[1])))
        return found if found and math.isfinite(found[1]) else None

    with np.errstate(over="ignore"):
        mean, per_seed = float(np.exp(estimate.mean)), tuple(np.exp(np.array(estimate.per_seed, float)).tolist())
        if not all(map(math.isfinite, (mean, *per_seed))):
            return None
        return HeldoutEstimate(mean, ends(estimate.ci95), per_seed, ends(estimate.ci95_heldout))
