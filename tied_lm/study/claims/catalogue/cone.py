"""Whether rows lie in a narrow cone, and rare rows drift together."""

import numpy as np

from tied_lm.bands import bands_of
from tied_lm.intervals import COSINE, summarize
from tied_lm.model.geometry.matrix import measure_matrix
from tied_lm.model.geometry.movement import common_drift
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES
from tied_lm.study.claims.study import Expectation, Study, Value


def measure(r: Results) -> dict[str, Value]:
    frequencies = r.frequencies("bytes")
    tied = r.matrices("bytes", "tied")
    bands = np.maximum(bands_of(frequencies), 1)  # band 0 may be a single row
    found = [measure_matrix(matrix, frequencies) for matrix in tied]
    drift = [
        common_drift(end - start, bands).cosine_by_band
        for start, end in zip(r.matrices("bytes", "tied", step=0), tied, strict=True)
    ]
    rare = np.array([one.mean_cosine_by_band["4"] for one in found])
    whole = np.array([one.mean_cosine for one in found])
    untied = {name: r.matrices("bytes", "untied", name) for name in ("embedding", "output")}
    return {
        "cone": whole,
        "rare": rare - whole,
        "drift": [one["4"] - one["1"] for one in drift],
        "mean cosine of the rows of band 4": summarize(rare, COSINE),
        "common drift of band 4": summarize([one["4"] for one in drift], COSINE),
        "common drift of bands 0 and 1": summarize([one["1"] for one in drift], COSINE),
        **{
            f"mean cosine, untied {name}": summarize(
                [measure_matrix(matrix).mean_cosine for matrix in matrices], COSINE
            )
            for name, matrices in untied.items()
        },
        "effective rank, tied": [one.effective_rank for one in found],
    }


STUDY = Study(
    name="cone",
    claims="9",
    claim="The rows of a tied matrix lie in a narrow cone, and rare rows drift in one common direction.",
    source="Gao et al. 2019, arXiv:1907.12009; Bis et al. 2021",
    settings={"bytes": ON_BYTES},
    tests=(
        Expectation("cone", "mean cosine of all pairs of rows", 1, 0.05, trial=".29"),
        Expectation("rare", "that of the rows of band 4, less it", 1, trial=".62 - .29"),
        Expectation(
            "drift", "cosine of a row's whole move with that of the others of its band, band 4 - bands 0 and 1", 1
        ),
    ),
    measure=measure,
    minutes=2,
    note="Bytes that do not occur in the training text are in a band of their own, and count among all pairs. "
    "Bands 0 and 1 are taken together since in a first try band 0 was a single row, which drifts with no other.",
)
