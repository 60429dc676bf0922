"""How a folder stands: what is in it, how far it is, and what it says."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tied_lm.checks import ConfigError
from tied_lm.config.folder import CONFIG, SWEEP, is_locked, read_config
from tied_lm.files import Damaged
from tied_lm.intervals import with_interval
from tied_lm.record.reader import Run, open_run
from tied_lm.record.scalars import METRICS
from tied_lm.study.subject import Subject
from tied_lm.study.summary import SUMMARY, Summary
from tied_lm.study.sweep import folder_name, settings_of
from tied_lm.study.sweepresults import RESULTS, read_results

DEEPEST = 3  # folders below the one that is looked through


@dataclasses.dataclass(frozen=True)
class State:
    """One folder."""

    kind: str  # comparison | sweep | run
    stands: str  # finished, or how far it is
    headline: str  # "" as long as there is none

    def __str__(self) -> str:
        return f"{self.kind}, {self.stands}" + (f": {self.headline}" if self.headline else "")


def find(place: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """Folders of sweeps, comparisons and single runs in and below a folder; not what belongs to one of them."""
    if any((place / name).is_file() for name in (SWEEP, CONFIG, METRICS)):
        yield place
    elif deepest and place.is_dir():
        for below in sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink()):
            yield from find(below, deepest - 1)


def state_of(place: Path) -> State:
    """How the folder of a sweep, a comparison or a run stands, whether or not it is being written."""
    try:
        if (place / SWEEP).exists():
            return _of_sweep(place, read_config(place, SWEEP))
        if (place / CONFIG).exists() and "compare" in read_config(place):
            return _of_comparison(place, Subject.of(place))
        return _of_run(place, open_run(place))
    except (ConfigError, Damaged, OSError) as error:
        return State("folder", "cannot be read", str(error))


def _going(place: Path) -> str:
    return "running" if is_locked(place) else "stopped"


def _of_sweep(place: Path, values: dict[str, Any]) -> State:
    points = [place / folder_name(k, settings) for k, settings in enumerate(settings_of(values["grid"]))]
    if not (place / RESULTS).exists():
        done = sum((point / SUMMARY).exists() for point in points)
        going = "running" if any(is_locked(point) for point in points) else "stopped"
        return State("sweep", f"{going}, {done} of {len(points)} points done", "")
    results, said = read_results(place), []
    for arm in results.arms:
        found = [point.differences.get(arm) for point in results.points]
        outcomes = [(difference.outcome or "without an interval") if difference else "diverged" for difference in found]
        counted = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
        if arm != results.baseline:
            said.append(f"{arm} {counted}")
    return State("sweep", f"finished, {len(points)} points", "; ".join(said))


def _of_comparison(place: Path, subject: Subject) -> State:
    if subject.summary is not None:
        return State("comparison", f"finished, {len(subject.summary.seeds)} seeds", headline(subject.summary))
    wanted = len(subject.names) * subject.values["compare"]["seeds"]
    done = sum(step == last for _, _, step, last, _ in subject.states)
    stands = f"{_going(place)}, {done} of {wanted} runs done"
    going = [
        f"{arm} seed {seed} at step {step:,} of {last:,}" for arm, seed, step, last, _ in subject.states if step < last
    ]
    return State("comparison", stands, ", ".join(going))


def headline(summary: Summary) -> str:
    """What a comparison says, in short."""
    said = [
        f"{name} {found.outcome or 'without an interval'}, {with_interval(found, '+')} nats"
        for name, found in summary.differences.items()
    ]
    return "; ".join([*said, *(f"{name} diverged" for name in summary.diverged)])


def _of_run(place: Path, run: Run) -> State:
    if not run.has_data():
        return State("run", f"{_going(place)}, no data yet", "")
    last = run.last()
    losses = run.scalars("loss/eval") if "loss/eval" in run.tags() else {}
    said = f"held-out loss {list(losses.values())[-1]:.4f}" if losses else ""
    if not (place / CONFIG).exists():
        return State("run", f"step {last['step']:,}, of a RowRecorder", said)
    steps = run.config.train.steps
    stands = "finished" if last["step"] == steps else f"{_going(place)}, step {last['step']:,} of {steps:,}"
    return State("run", stands, said)
