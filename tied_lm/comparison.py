"""All runs of a comparison in one folder, and their summary."""

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tied_lm import bands, folder, resources
from tied_lm.caveats import caveats
from tied_lm.checkpoint import METRIC
from tied_lm.config import (
    VERSION,
    Comparison,
    Config,
    ConfigError,
    Data,
    build_comparison,
    digest,
    flatten,
    resolved,
    to_dict,
)
from tied_lm.durable import read_json, write_json
from tied_lm.loop import Diverged, train_run
from tied_lm.matching import match
from tied_lm.optimizer import highest_rate
from tied_lm.report import REPORT, write_report
from tied_lm.runs import Run, open_run
from tied_lm.statistics import paired_difference, summarize
from tied_lm.streams import Stream, with_vocabulary
from tied_lm.train import Trainer, build_model, build_stream

SUMMARY = "summary.json"
DIVERGED = "diverged.json"
LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Arm:
    """What all runs of an arm share."""

    config: Config
    stream: Stream
    trainer: Trainer

    @classmethod
    def of(cls, config: Config, stream: Stream) -> "Arm":
        return cls(config, stream, Trainer(config, bands.bands_of(stream.frequencies)))

    def disk_bytes(self) -> int:
        """What the folder of one run takes at most."""
        return resources.disk_bytes(self.trainer, self.stream.token_strings)


def build_arms(comparison: Comparison, streams: dict[Data, Stream] | None = None) -> dict[str, Arm]:
    """Everything that the runs need, so that a mistake shows before anything is written.

    Args:
        streams: those that are there already; new ones are added, so that comparisons of the same tokens share them.

    Raises:
        ConfigError: a field names nothing that exists, or the tokens cannot be had.
    """
    base = comparison.base
    build_model(base)  # even where every arm overrides it, a mistake in it is one
    for config in comparison.arms.values():
        resources.check_memory(config)
    streams = {} if streams is None else streams
    if base.data not in streams:
        streams[base.data] = build_stream(base)
    stream = streams[base.data].with_seed(base.seed)
    return {name: Arm.of(config, stream) for name, config in comparison.arms.items()}


def comparison_values(values: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """The resolved config of a comparison, without what it does not say of the text."""
    compare = {
        "arms": {name: str(text) for name, text in resolved(values)["compare"]["arms"].items()},
        "baseline": comparison.baseline,
        "seeds": comparison.seeds,
        "match": comparison.match,
    }
    return to_dict(comparison.base) | {"version": VERSION, "compare": compare}


def name_of(values: Mapping[str, Any]) -> str:
    """A short name for a resolved config; seeds may be added to a comparison, so it does not depend on their number."""
    return digest(dict(values) | {"compare": {k: v for k, v in values["compare"].items() if k != "seeds"}})


@dataclasses.dataclass(frozen=True)
class Plan:
    """A comparison and everything that its runs need; nothing is written yet."""

    comparison: Comparison
    arms: dict[str, Arm]
    matched: dict[str, Any]  # what was done to the arms, as `match` tells it
    values: dict[str, Any]  # the content of config.json

    @classmethod
    def of(cls, values: Mapping[str, Any], streams: dict[Data, Stream] | None = None) -> "Plan":
        """The plan that nested values describe.

        Args:
            streams: see `build_arms`.

        Raises:
            ConfigError: of `build_comparison`, `match` and `build_arms`.
        """
        values = with_vocabulary(values)
        comparison, matched = match(build_comparison(values))
        arms = build_arms(comparison, streams)
        resolved = comparison_values(values, comparison) | arms[comparison.baseline].stream.content
        return cls(comparison, arms, matched, resolved)

    @property
    def about(self) -> dict[str, Any] | None:
        """How the text is split, if there is one."""
        return self.arms[self.comparison.baseline].stream.about

    def updates(self) -> list[tuple[str, int]]:
        """Arm and number of updates of each run, in their order."""
        return [(name, config.train.steps) for name, config in self.comparison.runs()]

    def disk_bytes(self) -> int:
        """What the folder of the comparison takes at most."""
        seeds = self.comparison.seeds
        runs = seeds * sum(arm.disk_bytes() for arm in self.arms.values())
        return runs + resources.summary_bytes(self.comparison.base, len(self.arms), seeds)


def run_folder(place: Path, arm: str, config: Config) -> Path:
    return place / arm / f"seed{config.seed}"


def check_folder(place: Path, values: dict[str, Any], file: str = folder.CONFIG) -> None:
    """Refuse a folder of another comparison, or one with more seeds than are asked for.

    Args:
        file: where in the folder its config is.

    Raises:
        ConfigError: the fields that differ are named.
    """
    folder.check(place, values, ignore=("compare.seeds",), file=file)
    path = place / file
    there = read_json(path, "restore it")["compare"]["seeds"] if path.exists() else 0
    if values["compare"]["seeds"] < there:
        raise ConfigError(
            "compare.seeds", values["compare"]["seeds"], f"at least {there}, which the folder was made with"
        )


def read_summary(place: Path) -> dict[str, Any]:
    return read_json(place / SUMMARY, "remove that file, and the same command makes it again")


def read_diverged(place: Path) -> dict[str, str]:
    """The arms that are known to diverge, each with the reason."""
    path = place / DIVERGED
    return read_json(path, "remove that file, and the same command finds those arms again") if path.exists() else {}


def is_complete(place: Path, plan: Plan) -> bool:
    """Whether every run, but for those of arms that are known to diverge, is finished, summarised and reported."""
    diverged = read_diverged(place)
    return (
        (place / REPORT).exists()
        and (place / SUMMARY).exists()
        and len(read_summary(place)["seeds"]) == plan.comparison.seeds
        and all(
            folder.is_finished(run_folder(place, name, config), config.train.steps)
            for name, config in plan.comparison.runs()
            if name not in diverged
        )
    )


def complete(
    place: Path,
    plan: Plan,
    stop: threading.Event,
    start: Callable[[str, int], Callable[[int], None]],
) -> None:
    """Open or create a comparison's folder, train every run that is not finished, summarise and report.

    An arm that diverges is entered in diverged.json; its other runs are left out, and the other arms go on.

    Args:
        start: called with the arm and the seed of each run; returns the run's `progress` (see `train_run`).

    Raises:
        ConfigError: another process is writing the folder.
        Interrupted, Damaged: see `train_run`.
    """
    with folder.locked(place):
        write_json(place / folder.CONFIG, plan.values)
        diverged = read_diverged(place)
        for name, config in plan.comparison.runs():
            if name in diverged:
                continue
            progress = start(name, config.seed)
            arm = plan.arms[name]
            stream = arm.stream.with_seed(config.seed)
            try:
                train_run(arm.trainer, config, stream, run_folder(place, name, config), stop, progress)
            except Diverged as error:
                diverged[name] = str(error)
                write_json(place / DIVERGED, diverged)
        summary = summarize_comparison(plan, place)
        write_json(place / SUMMARY, summary)
        write_report(place, summary)


def _clipped(run: Run) -> float:
    """Share of all updates that were clipped; each record speaks of the updates since the one before."""
    shares = run.scalars("optimizer/clipped")
    lengths = np.diff([0, *shares])
    return float(np.sum(lengths * np.array(list(shares.values()))) / run.config.train.steps)


def _bands(arm: Arm, runs: list[Run]) -> dict[str, Any]:
    """By band: rows, their share of the tokens, loss, and for a tied model the lookup's share and cosine."""
    tied = arm.trainer.untied_from is None
    of_row, frequencies = np.asarray(arm.trainer.bands), arm.stream.frequencies
    last = [run.last() for run in runs]
    found: dict[str, Any] = {}
    for band in np.unique(of_row):
        name, rows = bands.NAMES[band], of_row == band
        found[name] = {"rows": int(rows.sum()), "frequency": float(frequencies[rows].sum())}
        tags = {"loss": f"band/{name}/loss"}
        if tied:
            tags |= {key: f"probe/band/{name}/{key}" for key in ("share", "cosine")}
        for key, tag in tags.items():
            # A rare band may have no token in the held-out sample, and then has no loss.
            found[name][key] = _measure(last, tag)
    return found


def _measure(last: list[dict[str, float]], tag: str) -> dict[str, Any] | None:
    """A scalar at the last step over the seeds; None where it means nothing, or is undefined in all of them."""
    values = [line.get(tag, math.nan) for line in last]
    return None if all(map(math.isnan, values)) else summarize(values)


def summarize_comparison(plan: Plan, place: Path) -> dict[str, Any]:
    """The content of summary.json. Losses are held-out, in nats a token, at the last step.

    An arm that diverged stands under `diverged` alone; without the baseline there are no differences.
    """
    comparison, arms, diverged = plan.comparison, plan.arms, read_diverged(place)
    baseline = arms[comparison.baseline]
    summary: dict[str, Any] = {"entropy": baseline.stream.entropy, "text": plan.about, "arms": {}}
    for name, arm in arms.items():
        if name in diverged:
            continue
        runs = [open_run(run_folder(place, name, c)) for other, c in comparison.runs() if other == name]
        tied = arm.trainer.untied_from is None
        account = arm.trainer.account()
        excess = None
        if arm.stream.entropy is not None:
            excess = summarize([run.last()["loss/excess"] for run in runs])
        split, last = None, [run.last() for run in runs]
        if tied:
            split = {key: _measure(last, f"probe/split/{key}") for key in ("share", "cosine")}
        summary["arms"][name] = {
            "parameters": account["total"],
            "account": account,
            "tied": tied,
            "body": arm.config.model.body,
            "eval_loss": summarize([run.last()[METRIC] for run in runs]),
            "excess": excess,
            **{key: _measure(last, f"loss/{key}") for key in ("perplexity", "bits_per_byte")},
            "clipped": float(np.mean([_clipped(run) for run in runs])),
            "split": split,
            "bands": _bands(arm, runs),
            "optimizer": dataclasses.asdict(arm.config.optimizer),
            "highest_rate": highest_rate(arm.config.optimizer, arm.config.train.steps),
            "steps": arm.config.train.steps,
            "caveats": caveats(name, runs, arm.stream.frequencies, arm.stream.entropy, arm.trainer.stateful),
        }
    losses = {name: arm["eval_loss"]["per_seed"] for name, arm in summary["arms"].items()}
    differences = {
        name: {"eval_loss": paired_difference(values, losses[comparison.baseline])}
        for name, values in losses.items()
        if name != comparison.baseline and comparison.baseline in losses
    }
    (only,) = differences.values() if len(differences) == 1 else (None,)
    first = baseline.config
    return summary | {
        "baseline": comparison.baseline,
        "diverged": {
            name: {"reason": reason, "parameters": arms[name].trainer.account()["total"]}
            for name, reason in diverged.items()
        },
        "differences": differences,
        "difference": only and only["eval_loss"],
        "seeds": [first.seed + k for k in range(comparison.seeds)],
        "eval_tokens": int(min(first.data.eval_tokens, baseline.stream.heldout_tokens)),
        "probe_tokens": int(min(first.log.probe_tokens, baseline.stream.heldout_tokens)),
        "arms_differ_in": _differing(arms),
        "match": plan.matched,
        "versions": {library: version(library) for library in LIBRARIES},
    }


def _differing(arms: Mapping[str, Arm]) -> list[str]:
    """Config fields in which the arms differ."""
    flat = [flatten(to_dict(arm.config)) for arm in arms.values()]
    return [field for field in flat[0] if len({json.dumps(f[field]) for f in flat}) > 1]
