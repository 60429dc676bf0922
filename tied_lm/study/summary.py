"""What the runs of a comparison say together: the content of summary.json."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from tied_lm import bands
from tied_lm.config import Comparison, flatten, to_dict
from tied_lm.intervals import COSINE, SHARE, Scale, summarize
from tied_lm.record.reader import Run
from tied_lm.study.caveats import caveats
from tied_lm.study.heldout import Heldout
from tied_lm.study.plan import Arm, Plan
from tied_lm.train.optimizer import highest_rate

LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
SCALES: dict[str, Scale] = {"share": SHARE, "cosine": COSINE}


def is_of(summary: Mapping[str, Any], comparison: Comparison) -> bool:
    """Whether a summary is that of so many seeds and of the margin."""
    return len(summary["seeds"]) == comparison.seeds and summary.get("margin") == comparison.margin


def summarize_comparison(
    plan: Plan, runs: Mapping[str, Sequence[Run]], diverged: Mapping[str, str], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The content of summary.json. Losses are held-out, in nats a token, at the last step.

    `ci95` is the interval over seeds and held-out clusters (see `statistics.Crossed`), `ci95_heldout` that over the
    clusters alone, `ci95_simultaneous` of differences holds for all of them at once. Shares and cosines have an
    interval over the seeds, at this probe. An arm that diverged stands under `diverged` alone; without the baseline
    there are no differences.

    Args:
        runs: of each arm that did not diverge.
        diverged: the reasons of those that did.
        before: the summary that is replaced. The seeds it was made with were a look at the result.
    """
    comparison, arms = plan.comparison, plan.arms
    baseline, first = comparison.baseline, arms[comparison.baseline].config
    stream = arms[baseline].stream
    eval_tokens = int(min(first.data.eval_tokens, stream.heldout_tokens))
    kind, last = stream.heldout_clusters(eval_tokens).kind, slice(-1, None)
    heldout = {name: one for name, of_arm in runs.items() for one in Heldout.of_runs(of_arm, kind, last).values()}
    others = [name for name in runs if name != baseline and baseline in runs]
    differences = {
        name: {"eval_loss": heldout[name].less(heldout[baseline]).difference(comparison.margin, len(others))}
        for name in others
    }
    (only,) = differences.values() if len(differences) == 1 else (None,)
    any_arm = next(iter(heldout.values()), None)
    return {
        "entropy": stream.entropy,
        "law_loss": any_arm and any_arm.law_loss(),
        "text": plan.about,
        "arms": {name: _arm(name, arms[name], of_arm, heldout[name]) for name, of_arm in runs.items()},
        "baseline": baseline,
        "diverged": {
            name: {"reason": reason, "parameters": arms[name].trainer.account()["total"]}
            for name, reason in diverged.items()
        },
        "differences": differences,
        "difference": only and only["eval_loss"],
        "margin": comparison.margin,
        "seeds": [first.seed + k for k in range(comparison.seeds)],
        "looks": _looks(before, comparison.seeds),
        "clusters": any_arm and {"kind": any_arm.kind, "count": int(any_arm.tokens.size)},
        "eval_tokens": eval_tokens,
        "probe_tokens": int(min(first.log.probe_tokens, stream.heldout_tokens)),
        "arms_differ_in": _differing(arms),
        "match": plan.matched,
        "versions": {library: version(library) for library in LIBRARIES},
    }


def _looks(before: Mapping[str, Any] | None, seeds: int) -> list[int]:
    """The numbers of seeds at which the result was looked at, the present one last."""
    looks = [] if before is None else list(before.get("looks", [len(before["seeds"])]))
    return looks if looks[-1:] == [seeds] else [*looks, seeds]


def _arm(name: str, arm: Arm, runs: Sequence[Run], heldout: Heldout) -> dict[str, Any]:
    """What is said of one arm."""
    tied, account, last = arm.trainer.untied_from is None, arm.trainer.account(), [run.last() for run in runs]
    return {
        "parameters": account["total"],
        "account": account,
        "tied": tied,
        "body": arm.config.model.body,
        **heldout.measures(arm.stream.perplexity),
        "clipped": float(np.mean([_clipped(run) for run in runs])),
        "split": {key: _measure(last, f"probe/split/{key}", scale) for key, scale in SCALES.items()} if tied else None,
        "bands": _bands(arm, last, heldout),
        "optimizer": dataclasses.asdict(arm.config.optimizer),
        "highest_rate": highest_rate(arm.config.optimizer, arm.config.train.steps),
        "steps": arm.config.train.steps,
        "caveats": caveats(name, list(runs), arm.stream.frequencies, arm.stream.entropy, arm.trainer.stateful),
    }


def _clipped(run: Run) -> float:
    """Share of all updates that were clipped; each record speaks of the updates since the one before."""
    shares = run.scalars("optimizer/clipped")
    lengths = np.diff([0, *shares])
    return float(np.sum(lengths * np.array(list(shares.values()))) / run.config.train.steps)


def _bands(arm: Arm, last: list[dict[str, float]], heldout: Heldout) -> dict[str, Any]:
    """By band: rows, their share of the tokens, loss, and for a tied model the lookup's share and cosine."""
    of_row, frequencies = np.asarray(arm.trainer.bands), arm.stream.frequencies
    found: dict[str, Any] = {}
    for band in np.unique(of_row):
        name, rows = bands.NAMES[band], of_row == band
        found[name] = {
            "rows": int(rows.sum()),
            "frequency": float(frequencies[rows].sum()),
            "loss": heldout.band_loss(name),
        }
        if arm.trainer.untied_from is None:
            found[name] |= {key: _measure(last, f"probe/band/{name}/{key}", scale) for key, scale in SCALES.items()}
    return found


def _measure(last: list[dict[str, float]], tag: str, scale: Scale) -> dict[str, Any] | None:
    """A scalar at the last step over the seeds; None where it is undefined in all of them."""
    values = [line.get(tag, math.nan) for line in last]
    return None if all(map(math.isnan, values)) else summarize(values, scale)


def _differing(arms: Mapping[str, Arm]) -> list[str]:
    """Config fields in which the arms differ."""
    flat = [flatten(to_dict(arm.config)) for arm in arms.values()]
    return [field for field in flat[0] if len({json.dumps(f[field]) for f in flat}) > 1]
