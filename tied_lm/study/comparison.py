"""All runs of a comparison in one folder, and their summary."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tied_lm.checks import ConfigError
from tied_lm.config import Config, folder
from tied_lm.files import read_json, write_json
from tied_lm.record.reader import Run, Shelf, check_logs, open_run
from tied_lm.record.scalars import is_finished
from tied_lm.record.shared import share
from tied_lm.study.board import write_board
from tied_lm.study.plan import Plan
from tied_lm.study.provenance import recorded
from tied_lm.study.summary import REPORT, SUMMARY, read_summary, summarize_comparison, write_summary
from tied_lm.train.loop import Diverged, run_values, train_run
from tied_lm.train.processes import from_first, is_first

DIVERGED = "diverged.json"


def run_folder(place: Path, arm: str, config: Config) -> Path:
    return place / arm / f"seed{config.seed}"


def check_folder(place: Path, values: dict[str, Any], file: str = folder.CONFIG) -> None:
    """Refuse a folder of another comparison, or one with more seeds than are asked for.

    Args:
        file: where in the folder its config is.

    Raises:
        ConfigError: the fields that differ are named.
    """
    folder.check(place, values, file)
    there = folder.read_config(place, file)["compare"]["seeds"] if (place / file).exists() else 0
    if values["compare"]["seeds"] < there:
        raise ConfigError(
            "compare.seeds", values["compare"]["seeds"], f"at least {there}, which the folder was made with"
        )


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
        and read_summary(place).is_of(plan.comparison)
        and all(
            is_finished(run_folder(place, name, config), config.train.steps)
            for name, config in plan.comparison.runs()
            if name not in diverged
        )
    )


def check_runs(place: Path, plan: Plan) -> None:
    """See that all runs that there are belong to it, and that their logs hold what was written.

    Raises:
        ConfigError: a folder is that of another run, or its config is not what was written.
        Damaged: it names the log that is not what was written.
    """
    for name, config in plan.comparison.runs():
        of_run = run_folder(place, name, config)
        folder.check(of_run, run_values(config, plan.arms[name].stream.with_seed(config.seed)))
        check_logs(of_run)


def complete(
    place: Path,
    plan: Plan,
    stop: threading.Event,
    start: Callable[[str, int], Callable[[int], None]],
) -> None:
    """Open or create a comparison's folder, train every run that is not finished, summarise and report.

    An arm that diverges is entered in diverged.json; its other runs are left out, and the other arms go on.

    Of several processes that train together the first does all but the training alone.

    Args:
        start: called with the arm and the seed of each run; returns the run's `progress` (see `train_run`).

    Raises:
        ConfigError: another process is writing the folder.
        Interrupted, Damaged: see `train_run`.
    """
    if not is_first():
        _train(place, plan, stop, start)
        return
    with folder.locked(place):
        write_json(place / folder.CONFIG, plan.values)
        with recorded(place):
            diverged = _train(place, plan, stop, start)
            share(run_folder(place, name, config) for name, config in plan.comparison.runs())
            before = read_summary(place) if (place / SUMMARY).exists() else None
            shelf, runs = Shelf(), dict[str, list[Run]]()
            for name, config in plan.comparison.runs():
                if name not in diverged:
                    runs.setdefault(name, []).append(open_run(run_folder(place, name, config), shelf))
            summary = summarize_comparison(plan, runs, diverged, before)
            write_board(place, plan, summary, runs)
            write_summary(place, summary)
        from tied_lm.study.report import write_report  # here, since pictures take long to load

        write_report(place, shelf)


def _train(
    place: Path,
    plan: Plan,
    stop: threading.Event,
    start: Callable[[str, int], Callable[[int], None]],
) -> dict[str, str]:
    """Train every run that is not finished; the arms that diverged, each with the reason."""
    diverged = from_first(lambda: read_diverged(place))
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
            if is_first():
                write_json(place / DIVERGED, diverged)
    return diverged
