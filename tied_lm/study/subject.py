"""What a report is about: the runs in a folder, finished or not."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from tied_lm.bands import NAMES
from tied_lm.checks import ConfigError
from tied_lm.config import Config
from tied_lm.config.folder import CONFIG, read_config
from tied_lm.record.reader import Run, Shelf, open_run
from tied_lm.rows import FIELDS, PARTS
from tied_lm.study.members import members
from tied_lm.study.palette import Style, arm_styles
from tied_lm.study.summary import SUMMARY, Summary, read_summary
from tied_lm.train.build import build_model

ALL = "all"  # rows, beside the bands
ANOTHER = "the folder of a comparison, a sweep or a run, with its config.json or sweep.json"


@dataclasses.dataclass(frozen=True)
class Probed:
    """What the probe of one run says: by band at each step (T), of some tokens (F) at each step, and of all rows at the
    last one."""

    steps: Int[np.ndarray, "T"]
    split: dict[str, dict[str, Float[np.ndarray, "T"]]]  # share and cosine by band, `ALL` among them
    tokens: dict[str, Float[np.ndarray, "T F"]]  # by part, of the tokens that are followed
    last: dict[str, Float[np.ndarray, "V"]]  # by field, at the last step
    frequency: Float[np.ndarray, "V"]
    strings: list[str]
    followed: list[int]

    @classmethod
    def of(cls, data: xr.Dataset, named: tuple[int, ...]) -> "Probed":
        """Of the rows that a run has kept.

        Args:
            named: ids to follow beside a frequent, a middle and a rare one.
        """
        fields = {name: data[name].values for name in (*PARTS, "cosine")}
        of_band = data["band"].values
        rows = {NAMES[band]: np.flatnonzero(of_band == band) for band in np.unique(of_band)}
        rows[ALL] = np.arange(of_band.size)
        frequency = data["frequency"].values
        seen = np.argsort(-frequency, kind="stable")[: np.count_nonzero(frequency)]
        followed = list(dict.fromkeys([*(int(seen[k]) for k in (0, len(seen) // 2, -1)), *named]))
        strings = data["token_string"].values.tolist() if "token_string" in data.coords else []
        return cls(
            data["step"].values,
            {key: {band: _by_step(fields, key, of) for band, of in rows.items()} for key in ("share", "cosine")},
            {name: fields[name][:, followed] for name in PARTS},
            {name: values[-1].astype(np.float64) for name, values in fields.items()},
            frequency,
            strings or [str(token) for token in range(of_band.size)],
            followed,
        )

    @property
    def share(self) -> Float[np.ndarray, "V"]:
        """The lookup's share in each row at the last step; NaN where no part asks for anything."""
        lookup_V, scoring_V = (self.last[use] ** 2 for use in ("lookup", "scoring"))
        with np.errstate(invalid="ignore"):
            return lookup_V / (lookup_V + scoring_V)


def _by_step(
    fields: dict[str, Float[np.ndarray, "T V"]], key: str, rows: Int[np.ndarray, "R"]
) -> Float[np.ndarray, "T"]:
    """The share or the cosine of some rows at each step."""
    of_rows = FIELDS[key].kind.of_rows
    assert of_rows is not None
    found = []
    for k in range(len(fields["lookup"])):
        values = {name: fields[name][k, rows].astype(np.float64) for name in ("lookup", "scoring", "cosine")}
        found.append(of_rows(values, key))
    return np.array(found)


@dataclasses.dataclass(frozen=True)
class ArmRuns:
    """The runs of an arm that have written something."""

    name: str
    style: Style
    runs: list[Run]
    untied_from: int | None  # the step from which lookup and scoring have a matrix each; None if never

    @property
    def config(self) -> Config:
        """That of the first seed."""
        return self.runs[0].config

    @property
    def split_until(self) -> int | None:
        """The step up to which share and cosine have a meaning; None if to the end."""
        return self.untied_from

    @property
    def is_split(self) -> bool:
        """Whether share and cosine have a meaning at some step."""
        return self.untied_from is None or self.untied_from > 0

    @functools.cached_property
    def probed(self) -> list[Probed]:
        """What the probe says of each run that has had one."""
        found = []
        for run in self.runs:
            try:
                data = run.probe
            except FileNotFoundError:
                continue
            with data:
                found.append(Probed.of(data, run.config.log.tokens))
        return found


@dataclasses.dataclass(frozen=True)
class Subject:
    """A folder with one run or the runs of a comparison."""

    place: Path
    values: dict[str, Any]  # of its config.json
    arms: dict[str, ArmRuns]  # those that have written something
    names: list[str]  # of all arms
    states: list[tuple[str, int, int, int, float]]  # arm, seed, step, last step and held-out loss (NaN if none) by run
    summary: Summary | None  # of a finished comparison

    @classmethod
    def of(cls, place: Path, shelf: Shelf | None = None) -> "Subject":
        """What there is in a folder so far.

        Args:
            shelf: what is known of its runs already.

        Raises:
            ConfigError: it is neither that of a comparison nor that of a run.
            Damaged: what was written is not what is there.
        """
        if not (place / CONFIG).exists():
            raise ConfigError("DIR", str(place), ANOTHER)
        values = read_config(place)
        if "compare" not in values:
            of_arms = {str(values["model"]["tying"]): [open_run(place, shelf)]}
        else:
            of_arms = {arm: [] for arm in values["compare"]["arms"]}
            for arm, _, run in members(place, values, shelf):
                of_arms[arm].append(run)
        summary = read_summary(place) if (place / SUMMARY).exists() else None
        if summary is not None and len(summary.seeds) < values["compare"]["seeds"]:
            summary = None  # seeds were added, and are not there yet
        styles, arms, states = arm_styles(list(of_arms)), {}, []
        for name, runs in of_arms.items():
            known = [(run, line) for run in runs if (line := _last(run))]
            states += [(name, run.config.seed, *state) for run, state in known]
            if known and (summary is None or name in summary.arms):
                written = [run for run, _ in known]
                arms[name] = ArmRuns(name, styles[name], written, build_model(written[0].config).untied_from)
        return cls(place, values, arms, list(of_arms), states, summary)

    def table(self) -> list[list[str]]:
        """How far each run is; the first row is the head."""
        rows = [["run", "step", "of", "held-out loss"]]
        for arm, seed, step, last, loss in self.states:
            rows.append([f"{arm}, seed {seed}", f"{step:,}", f"{last:,}", "-" if math.isnan(loss) else f"{loss:.4f}"])
        return rows

    @property
    def bands(self) -> list[str]:
        """Those that have rows."""
        probed = next((arm.probed[0] for arm in self.arms.values() if arm.probed), None)
        return [] if probed is None else [band for band in probed.split["share"] if band != ALL]

    @property
    def split(self) -> list[ArmRuns]:
        """The arms whose share and cosine have a meaning at some step, and that were probed."""
        return [arm for arm in self.arms.values() if arm.is_split and arm.probed]

    @property
    def seeds(self) -> int:
        """How many an arm has at most."""
        return max((len(arm.runs) for arm in self.arms.values()), default=0)


def _last(run: Run) -> tuple[int, int, float] | None:
    """The newest step, the last one that there will be, and the newest held-out loss; None if nothing is written."""
    try:
        line = run.last()
    except FileNotFoundError:
        return None
    loss = run.scalars("loss/eval") if "loss/eval" in run.tags() else {}
    return int(line["step"]), run.config.train.steps, list(loss.values())[-1] if loss else math.nan
