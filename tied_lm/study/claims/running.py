"""Doing a study: its comparisons, what is measured in them, and the file that keeps it."""

import dataclasses
import datetime
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from tied_lm.config import Data, defaults, differing_fields, digest, to_dict
from tied_lm.data.sources import Stream
from tied_lm.files import read_json, write_json
from tied_lm.intervals import Ends, Estimate
from tied_lm.study import comparison as c
from tied_lm.study.claims.results import Compared, Missing, Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Outcome, Study, Value, judge
from tied_lm.study.plan import Plan
from tied_lm.study.summary import LIBRARIES, read_summary

STUDY = "study.json"
AGAIN = "remove that file, and the same command makes it again"
_NOTHING_EXPECTED = Expectation("", "", 1)

Beside = dict[str, tuple[float | None, Ends | None]]  # mean and interval over seeds


@dataclasses.dataclass(frozen=True)
class Done:
    """A study with its results: the content of study.json."""

    definition: str  # digest of what was asked
    scale: str
    date: str  # on which it was measured
    seconds: float  # since the last start
    versions: dict[str, str]
    settings: dict[str, dict[str, Any]]  # of each comparison: base, overrides, arms, parameters of each arm
    outcomes: tuple[Outcome, ...]
    beside: Beside  # what is told beside the tests
    seeds: tuple[int, ...]


def definition(study: Study, plans: Mapping[str, Plan]) -> str:
    """A short name for what a study asks: its tests, and the resolved configs of its comparisons."""
    tests = [[test.key, test.words, test.sign, test.margin] for test in study.tests]
    asked = json.dumps([tests, {name: digest(plan.values) for name, plan in plans.items()}], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()[:8]


def plans_of(study: Study, scale: str, text: tuple[str, str] | None, streams: dict[Data, Stream]) -> dict[str, Plan]:
    """The comparisons of a study; nothing is written.

    Raises:
        ConfigError: of `Plan.of`.
    """
    return {name: Plan.of(setting.values(scale, text), streams) for name, setting in study.settings.items()}


def read_done(place: Path, asked: str) -> Done | None:
    """What was found before, if the same was asked.

    Raises:
        Damaged: the file is not what was written.
    """
    path = place / STUDY
    if not path.exists():
        return None
    values = read_json(path, AGAIN)
    if values["definition"] != asked:
        return None
    outcomes = tuple(
        Outcome(**one | {"ci95": one["ci95"] and tuple(one["ci95"]), "per_seed": tuple(one["per_seed"])})
        for one in values["outcomes"]
    )
    beside = {words: (mean, ends and tuple(ends)) for words, (mean, ends) in values["beside"].items()}
    return Done(**values | {"outcomes": outcomes, "beside": beside, "seeds": tuple(values["seeds"])})


def do_study(
    study: Study,
    scale: str,
    text: tuple[str, str] | None,
    workdir: Path,
    stop: threading.Event,
    started: Callable[[str], object],
) -> Done:
    """Complete the comparisons of a study, measure, and keep it in study.json; at once if that is done.

    Comparisons lie in workdir/comparisons by the digest of their configs, so that studies share them.

    Args:
        started: called with a word on what is done next.

    Raises:
        ConfigError, Damaged, Interrupted: of `complete`.
    """
    begun, streams = time.perf_counter(), dict[Data, Stream]()
    plans = plans_of(study, scale, text, streams)
    place, asked = workdir / study.name, definition(study, plans)
    if before := read_done(place, asked):
        return before
    compared = {}
    for name, plan in plans.items():
        started(name)
        folder = workdir / "comparisons" / f"{study.settings[name].base}-{digest(plan.values)}"
        c.check_folder(folder, plan.values)
        if not c.is_complete(folder, plan):
            c.complete(folder, plan, stop, lambda *_: lambda _: None)
        compared[name] = Compared(plan, folder, read_summary(folder))
    started("measuring")
    found = _measure(study, Results(compared))
    done = Done(
        definition=asked,
        scale=scale,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        seconds=round(time.perf_counter() - begun, 1),
        versions={name: next(iter(compared.values())).summary.versions[name] for name in LIBRARIES},
        settings={name: _told(study.settings[name], one) for name, one in compared.items()},
        outcomes=found[0],
        beside=found[1],
        seeds=next(iter(compared.values())).summary.seeds,
    )
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / STUDY, dataclasses.asdict(done))
    # Programs that no other study has; see the command `sweep`.
    jax.clear_caches()
    return done


def _measure(study: Study, results: Results) -> tuple[tuple[Outcome, ...], Beside]:
    """The outcomes of the tests, and what is told beside them."""
    try:
        values = study.measure(results)
    except Missing as error:
        missing = tuple(
            Outcome(test.words, test.sign, test.margin, test.trial, None, None, (), 1.0, str(error))
            for test in study.tests
        )
        return missing, {}
    outcomes = tuple(judge(test, values[test.key]) for test in study.tests)
    tested = {test.key for test in study.tests}
    beside = {words: _summarized(value) for words, value in values.items() if words not in tested}
    return outcomes, beside


def _summarized(value: Value) -> tuple[float | None, Ends | None]:
    """The mean and its interval; None where it is undefined for some seed."""
    if isinstance(value, Estimate):
        return (None, None) if None in value.per_seed else (value.mean, value.ci95)
    judged = judge(_NOTHING_EXPECTED, value)
    return judged.mean, judged.ci95


def _told(setting: Setting, compared: Compared) -> dict[str, Any]:
    """What a comparison was: how its config differs from the default, and its arms."""
    base = to_dict(compared.plan.comparison.base)
    known = {name: group for name, group in defaults().items() if name != "compare"}
    changed = [item for item in differing_fields(known, base) if not item.startswith(("version", "log.", "text_"))]
    return {
        "base": setting.base,
        "changed": [item.replace(": ", " ", 1) for item in changed],
        "arms": dict(setting.arms),
        "match": compared.plan.matched.rule,
        "matched": compared.plan.matched.arms,
        "parameters": {name: arm.parameters for name, arm in compared.summary.arms.items()},
        "heldout_tokens": compared.summary.eval_tokens,
    }
