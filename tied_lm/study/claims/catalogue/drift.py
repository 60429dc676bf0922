"""How far the rows of an untied model go from where they started."""

import numpy as np

from tied_lm.intervals import COSINE, summarize
from tied_lm.model.geometry.movement import measure_drift
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES
from tied_lm.study.claims.study import Expectation, Study, Value


def measure(r: Results) -> dict[str, Value]:
    cosines = {}
    for use, name in (("output", "output"), ("input", "embedding")):
        pairs = zip(r.matrices("bytes", "untied", name, 0), r.matrices("bytes", "untied", name), strict=True)
        cosines[use] = np.array([np.nanmean(measure_drift(pair).cosine_to_start) for pair in pairs])
    return {
        "difference": cosines["input"] - cosines["output"],
        **{f"cosine to the start, {use}": summarize(value, COSINE) for use, value in cosines.items()},
    }


STUDY = Study(
    name="drift",
    claims="7",
    claim="The output rows of an untied model drift faster from their start than its input rows.",
    source="Lopardo et al. 2026, arXiv:2603.26663",
    settings={"bytes": ON_BYTES},
    tests=(Expectation("difference", "cosine to the start, input - output", 1, trial=".69 - .34"),),
    measure=measure,
    minutes=2,
    note="Mean over rows. All rows of the output move at each step, those of the input only where they are looked up.",
)
