"""Whether rows go straight early in training."""

import numpy as np

from tied_lm.intervals import SHARE, summarize
from tied_lm.model.geometry.movement import measure_drift
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES
from tied_lm.study.claims.study import Expectation, Study, Value


def measure(r: Results) -> dict[str, Value]:
    steps = r.steps("bytes", "tied")
    half = len(steps) // 2
    phases = {"early": steps[: half + 1], "late": steps[half:][: half + 1]}
    straightness: dict[str, list[float]] = {phase: [] for phase in phases}
    for phase, some in phases.items():
        by_step = [r.matrices("bytes", "tied", step=step) for step in some]
        for of_seed in zip(*by_step, strict=True):
            straightness[phase].append(float(np.nanmedian(measure_drift(of_seed).straightness)))
    walk = 1 / np.sqrt(len(phases["early"]) - 1)
    early, late = np.array(straightness["early"]), np.array(straightness["late"])
    return {
        "early": early - walk,
        "fall": early - late,
        "straightness, first half of the training": summarize(early, SHARE),
        "straightness, second half": summarize(late, SHARE),
        "that of a random walk with as many steps": [walk] * early.size,
    }


STUDY = Study(
    name="rays",
    claims="23",
    claim="Token vectors move along rays early in training.",
    source="arXiv:2607.01455",
    settings={"bytes": ON_BYTES},
    tests=(
        Expectation("early", "displacement over path in the first half, less that of a random walk", 1),
        Expectation("fall", "displacement over path, first half - second half", 1),
    ),
    measure=measure,
    minutes=2,
    note="Median over the rows of the tied matrix; the path is by the five or six matrices of each half.",
)
