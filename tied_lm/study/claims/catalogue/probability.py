"""Whether the scoring matrix holds the frequencies of the tokens in one direction."""

import numpy as np
from jaxtyping import Float

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES, ON_TOY
from tied_lm.study.claims.study import Expectation, Study, Value


def explained(matrix: Float[np.ndarray, "V D"], frequencies: Float[np.ndarray, "V"]) -> float:
    """Share of the variance of the log frequency that the projections of the rows on their mean explain."""
    seen = frequencies > 0
    rows = np.asarray(matrix, np.float64)[seen]
    along = rows @ rows.mean(axis=0)
    return float(np.corrcoef(along, np.log(frequencies[seen]))[0, 1] ** 2)


def measure(r: Results) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for setting in ("bytes", "toy"):
        frequencies = r.frequencies(setting)
        order = np.random.default_rng(0).permutation(frequencies.size)
        for arm, name in (("tied", "embedding"), ("untied", "output")):
            matrices = r.matrices(setting, arm, name)
            found[f"{setting} {arm}"] = [explained(matrix, frequencies) for matrix in matrices]
            found[f"rows permuted, {setting}, {arm}"] = [explained(matrix[order], frequencies) for matrix in matrices]
    return found


STUDY = Study(
    name="probability",
    claims="24",
    claim="Output embeddings hold the probability of a token in one common direction.",
    source="Cho et al. 2024",
    settings={"bytes": ON_BYTES, "toy": ON_TOY},
    tests=(
        Expectation(
            "bytes untied", "r2 of log frequency and the projection on the mean row, untied output, bytes", 1, 0.5
        ),
        Expectation("bytes tied", "the same, tied matrix, bytes", 1, 0.5),
        Expectation("toy untied", "the same, untied output, toy stream without a body", 1, 0.5),
        Expectation("toy tied", "the same, tied matrix, toy stream without a body", 1, 0.5),
    ),
    measure=measure,
    minutes=2,
    note="Above one half counts as holding. The direction is that of the mean row; nothing is fitted.",
)
