"""What the runs of a comparison say together: the content of summary.json."""

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from tied_lm import bands
from tied_lm.config import Comparison, Optimizer, flatten, to_dict
from tied_lm.data.documents import Account
from tied_lm.files import Damaged, read_json, write_json
from tied_lm.intervals import COSINE, SHARE, Difference, Estimate, HeldoutEstimate, Scale, summarize, with_interval
from tied_lm.model.embedding import account_of, count_parameters
from tied_lm.record.reader import Run
from tied_lm.study.caveats import caveats
from tied_lm.study.heldout import ClusterCount, Heldout, Measures
from tied_lm.study.matching import Matching
from tied_lm.study.plan import Arm, Plan
from tied_lm.train.optimizer import highest_rate

SUMMARY = "summary.json"
REPORT = "report.html"
AGAIN = "remove that file, and the same command makes it again"
LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
SCALES: dict[str, Scale] = {"share": SHARE, "cosine": COSINE}


@dataclasses.dataclass(frozen=True)
class Split:
    """The lookup's share, and its cosine with the scoring, over the probe; None where undefined with every seed. The
    intervals are over the seeds, at this probe."""

    share: Estimate | None = None
    cosine: Estimate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandSummary(Split):
    """One band; in an arm that is not tied without share and cosine."""

    rows: int
    frequency: float  # of all tokens
    loss: HeldoutEstimate | None  # nats a token


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmSummary(Measures):
    """What is said of one arm. Fields with a default are those that older summaries lack."""

    parameters: int
    account: dict[str, int]  # see `model.embedding.account_of`
    tied: bool
    body: str
    clipped: float  # share of the updates
    split: Split | None  # of a tied arm
    bands: dict[str, BandSummary]
    optimizer: Optimizer
    highest_rate: float | None = None
    steps: int
    ms_per_update: float | None = None  # median over records and seeds; the one figure that no second run gives again
    peak_bytes: int | None = None  # of the updates, see `Trainer.peak_bytes`
    caveats: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class DivergedArm:
    """An arm without a result."""

    reason: str
    parameters: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a comparison says. Losses are held-out, in nats a token, at the last step. Fields with a default are those
    that older summaries lack."""

    entropy: float | None  # of the law
    law_loss: float | None = None  # of the law on the same tokens
    text: Account | None = None
    arms: dict[str, ArmSummary]  # but for those that diverged
    baseline: str
    diverged: dict[str, DivergedArm] = dataclasses.field(default_factory=dict)
    differences: dict[str, Difference]  # to the baseline, of the loss; of no arm if the baseline diverged
    margin: float | None = None
    seeds: tuple[int, ...]
    looks: tuple[int, ...] = ()  # numbers of seeds at which the result was looked at, the present one last
    clusters: ClusterCount | None = None  # None if every arm diverged
    eval_tokens: int
    probe_tokens: int
    arms_differ_in: tuple[str, ...]  # fields of the config
    match: Matching = dataclasses.field(default_factory=lambda: Matching("width", {}))
    versions: dict[str, str]

    def is_of(self, comparison: Comparison) -> bool:
        """Whether it is that of so many seeds and of the margin."""
        return len(self.seeds) == comparison.seeds and self.margin == comparison.margin

    @property
    def difference(self) -> Difference | None:
        """The only difference, if there is one."""
        (only,) = self.differences.values() if len(self.differences) == 1 else (None,)
        return only

    def table(self) -> list[list[str]]:
        """One row for each arm: parameters, loss, what the loss amounts to (where that means something), difference."""
        digits = {"excess": 4, "perplexity": 2, "bits_per_byte": 4}
        present = [key for key in digits if any(getattr(arm, key) for arm in self.arms.values())]
        names = [key.replace("_", " ") for key in present]
        rows = [["arm", "parameters", "held-out loss", *names, f"less {self.baseline}"]]
        for name, arm in self.arms.items():
            measures = [with_interval(getattr(arm, key), digits=digits[key]) for key in present]
            difference = with_interval(self.differences.get(name), "+")
            rows.append([name, f"{arm.parameters:,}", with_interval(arm.eval_loss), *measures, difference])
        for name, diverged in self.diverged.items():
            rows.append([name, f"{diverged.parameters:,}", "diverged", *("-" for _ in present), "-"])
        return rows

    def _repr_html_(self) -> str:
        """The table, as a notebook shows it."""
        head, *rows = [[html.escape(cell) for cell in row] for row in self.table()]
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        about = f"Losses in nats a token with their 95% intervals; {len(self.seeds)} seeds."
        return f"<p>{about}</p><table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{body}</table>"


def write_summary(place: Path, summary: Summary) -> None:
    """Replace summary.json in the folder of a comparison."""
    values = dataclasses.asdict(summary)
    values["differences"] = {name: {"eval_loss": difference} for name, difference in values["differences"].items()}
    values["difference"] = summary.difference and dataclasses.asdict(summary.difference)
    for arm in values["arms"].values():
        for band in arm["bands"].values() if not arm["tied"] else ():
            del band["share"], band["cosine"]
    write_json(place / SUMMARY, values)


def read_summary(place: Path) -> Summary:
    """What `write_summary` wrote, now or in an older version.

    Raises:
        Damaged: it is not that.
        FileNotFoundError: there is none.
    """
    values = read_json(place / SUMMARY, AGAIN)
    try:
        values["differences"] = {name: found["eval_loss"] for name, found in values["differences"].items()}
        summary: Summary = typed(Summary, values)
        if {summary.baseline, *summary.differences} - {*summary.arms, *summary.diverged}:
            raise KeyError("an arm")
        return summary
    except (AttributeError, KeyError, TypeError):
        raise Damaged(f"{place / SUMMARY} is no summary; {AGAIN}") from None


def typed(kind: Any, value: Any) -> Any:
    """A value of JSON as a type. A dataclass takes its fields and leaves what it does not know."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: typed(kinds[name], value[name]) for name in kinds if name in value})
    of = [one for one in get_args(kind) if one is not NoneType]
    if value is None and NoneType in get_args(kind):
        return value
    if not of:
        if kind is not Any and type(value) not in ((int, float) if kind is float else (kind,)):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return value
    if get_origin(kind) is dict:
        return {key: typed(of[1], one) for key, one in value.items()}
    if get_origin(kind) is tuple:
        return tuple(typed(of[0], one) for one in value)
    if get_origin(kind) is list:
        return [typed(of[0], one) for one in value]
    return typed(of[0], value)


def summarize_comparison(
    plan: Plan, runs: Mapping[str, Sequence[Run]], diverged: Mapping[str, str], before: Summary | None
) -> Summary:
    """What finished runs say.

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
    any_arm = next(iter(heldout.values()), None)
    return Summary(
        entropy=stream.entropy,
        law_loss=None if any_arm is None else any_arm.law_loss(),
        text=plan.about,
        arms={name: _arm(name, arms[name], of_arm, heldout[name]) for name, of_arm in runs.items()},
        baseline=baseline,
        diverged={
            name: DivergedArm(reason, count_parameters(arms[name].trainer.model)["total"])
            for name, reason in diverged.items()
        },
        differences={
            name: heldout[name].less(heldout[baseline]).difference(comparison.margin, len(others)) for name in others
        },
        margin=comparison.margin,
        seeds=tuple(first.seed + k for k in range(comparison.seeds)),
        looks=_looks(before, comparison.seeds),
        clusters=None if any_arm is None else any_arm.clusters,
        eval_tokens=eval_tokens,
        probe_tokens=int(min(first.log.probe_tokens, stream.heldout_tokens)),
        arms_differ_in=_differing(arms),
        match=plan.matched,
        versions={library: version(library) for library in LIBRARIES},
    )


def _looks(before: Summary | None, seeds: int) -> tuple[int, ...]:
    looks = () if before is None else before.looks or (len(before.seeds),)
    return looks if looks[-1:] == (seeds,) else (*looks, seeds)


def _arm(name: str, arm: Arm, runs: Sequence[Run], heldout: Heldout) -> ArmSummary:
    tied, last = arm.trainer.model.untied_from is None, [run.last() for run in runs]
    account = account_of(arm.trainer.model, arm.trainer.optimizer)
    return ArmSummary(
        **vars(heldout.measures(arm.stream.perplexity)),
        parameters=account["total"],
        account=account,
        tied=tied,
        body=arm.config.model.body,
        clipped=float(np.mean([_clipped(run) for run in runs])),
        split=Split(**_split(last, "probe/split")) if tied else None,
        bands=_bands(arm, last, heldout),
        optimizer=arm.config.optimizer,
        highest_rate=highest_rate(arm.config.optimizer, arm.config.train.steps),
        steps=arm.config.train.steps,
        ms_per_update=_time(runs),
        peak_bytes=arm.trainer.peak_bytes(arm.stream.ahead(0, 1, arm.trainer.model.layout)),
        caveats=tuple(caveats(name, list(runs), arm.stream.frequencies, arm.stream.entropy, arm.trainer.stateful)),
    )


def _time(runs: Sequence[Run]) -> float | None:
    """Milliseconds of an update; None if the runs were too short to tell."""
    tag = "time/ms_per_update"
    found = [ms for run in runs if tag in run.tags() for ms in run.scalars(tag).values()]
    return float(np.median(found)) if found else None


def _clipped(run: Run) -> float:
    """Share of all updates that were clipped; each record speaks of the updates since the one before."""
    shares = run.scalars("optimizer/clipped")
    lengths = np.diff([0, *shares])
    return float(np.sum(lengths * np.array(list(shares.values()))) / run.config.train.steps)


def _bands(arm: Arm, last: list[dict[str, float]], heldout: Heldout) -> dict[str, BandSummary]:
    of_row, frequencies = np.asarray(arm.trainer.bands), arm.stream.frequencies
    found = {}
    for band in np.unique(of_row):
        name, rows = bands.NAMES[band], of_row == band
        found[name] = BandSummary(
            **_split(last, f"probe/band/{name}") if arm.trainer.model.untied_from is None else {},
            rows=int(rows.sum()),
            frequency=float(frequencies[rows].sum()),
            loss=heldout.band_loss(name),
        )
    return found


def _split(last: list[dict[str, float]], group: str) -> dict[str, Estimate | None]:
    """Share and cosine at the last step over the seeds, by the name of a field of `Split`."""
    found = {}
    for key, scale in SCALES.items():
        values = [line.get(f"{group}/{key}", math.nan) for line in last]
        found[key] = None if all(map(math.isnan, values)) else summarize(values, scale)
    return found


def _differing(arms: Mapping[str, Arm]) -> tuple[str, ...]:
    """Config fields in which the arms differ."""
    flat = [flatten(to_dict(arm.config)) for arm in arms.values()]
    return tuple(field for field in flat[0] if len({json.dumps(f[field]) for f in flat}) > 1)
