"""All runs of a comparison in one folder, and their summary."""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tied_lm import bands, folder, resources
from tied_lm.build import build_model, build_stream
from tied_lm.checks import ConfigError
from tied_lm.config import VERSION, Comparison, Config, Data, build_comparison, digest, resolved, to_dict
from tied_lm.durable import read_json, write_json
from tied_lm.loop import Diverged, train_run
from tied_lm.matching import match
from tied_lm.metrics import is_finished
from tied_lm.report import REPORT, write_report
from tied_lm.runs import open_run
from tied_lm.sources import Stream, with_vocabulary
from tied_lm.summary import is_of, summarize_comparison
from tied_lm.train import Trainer

SUMMARY = "summary.json"
DIVERGED = "diverged.json"
MAY_CHANGE = ("seeds", "margin")  # of the group `compare`, in a folder


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
        "margin": comparison.margin,
    }
    return to_dict(comparison.base) | {"version": VERSION, "compare": compare}


def name_of(values: Mapping[str, Any]) -> str:
    """A short name for a resolved config; it does not depend on what may change in a folder."""
    return digest(dict(values) | {"compare": {k: v for k, v in values["compare"].items() if k not in MAY_CHANGE}})


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
    folder.check(place, values, ignore=tuple(f"compare.{name}" for name in MAY_CHANGE), file=file)
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
        and is_of(read_summary(place), plan.comparison)
        and all(
            is_finished(run_folder(place, name, config), config.train.steps)
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
        before = read_summary(place) if (place / SUMMARY).exists() else None
        runs = {
            name: [open_run(run_folder(place, name, c)) for other, c in plan.comparison.runs() if other == name]
            for name in plan.arms
            if name not in diverged
        }
        summary = summarize_comparison(plan, runs, diverged, before)
        write_json(place / SUMMARY, summary)
        write_report(place, summary)
