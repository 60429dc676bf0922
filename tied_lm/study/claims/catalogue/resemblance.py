"""Whether a tied matrix resembles the output or the input matrix of an untied model."""

import numpy as np

from tied_lm.intervals import COSINE, SHARE, summarize
from tied_lm.model.geometry.likeness import compare_matrices
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES, ON_TOY
from tied_lm.study.claims.study import Expectation, Study, Value


def measure(r: Results) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for setting in ("bytes", "toy"):
        tied, rho = r.matrices(setting, "tied"), {}
        for use, name in (("output", "output"), ("input", "embedding")):
            pairs = zip(r.matrices(setting, "untied", name), tied, strict=True)
            likeness = [compare_matrices(own, other) for own, other in pairs]
            rho[use] = np.array([one.likeness.spearman for one in likeness])
            words = f"of {use} and tied matrix, {setting}"
            found |= {
                f"rho {words}": summarize(rho[use], COSINE),
                f"rho {words}, rows permuted": summarize([one.permuted.spearman for one in likeness], COSINE),
                f"cosine after a linear map {words}": summarize(
                    [one.likeness.linear_cosine for one in likeness], COSINE
                ),
                f"shared neighbours {words}": summarize([one.likeness.neighbours for one in likeness], SHARE),
            }
        found[setting] = rho["output"] - rho["input"]
    return found


STUDY = Study(
    name="resemblance",
    claims="2, 6",
    claim="A tied matrix resembles the untied output matrix more than the untied input matrix.",
    source="Press & Wolf 2017, arXiv:1608.05859; Lopardo et al. 2026, arXiv:2603.26663",
    settings={"bytes": ON_BYTES, "toy": ON_TOY},
    tests=(
        Expectation("bytes", "rho(output, tied) - rho(input, tied), Transformer on bytes", 1, trial=".98 - .14"),
        Expectation("toy", "the same, toy stream without a body", 1, trial=".89 - .98"),
    ),
    measure=measure,
    minutes=2,
    note="rho is Spearman's, of the cosines of pairs of rows. At each seed the tied matrix and the input matrix start "
    "from the same values, the output matrix from others.",
)
