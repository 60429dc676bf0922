"""One second moment for all rows of the matrix that scores."""

import numpy as np

from tied_lm.intervals import COSINE, SHARE, summarize
from tied_lm.model.geometry.matrix import measure_matrix
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Study, Value

COUPLED = Setting(
    "bytes",
    {"adam": "model.tying=tied", "coupled": "model.tying=tied optimizer.name=coupled_adam"},
    baseline="adam",
)


def measure(r: Results) -> dict[str, Value]:
    found = {arm: [measure_matrix(m) for m in r.matrices("bytes", arm)] for arm in ("adam", "coupled")}
    mean_row = {arm: np.array([one.mean_row for one in measured]) for arm, measured in found.items()}
    return {
        "mean row": mean_row["coupled"] - mean_row["adam"],
        "loss": r.difference("bytes", "coupled"),
        **{f"norm of the mean row, {arm}": summarize(value, SHARE) for arm, value in mean_row.items()},
        **{
            f"mean cosine, {arm}": summarize([x.mean_cosine for x in of_seeds], COSINE)
            for arm, of_seeds in found.items()
        },
    }


STUDY = Study(
    name="coupled-adam",
    claims="13",
    claim="Sharing Adam's second moment across the vocabulary makes the matrix less anisotropic, at no loss.",
    source="Stollenwerk & Stollenwerk 2025, arXiv:2502.08441",
    settings={"bytes": COUPLED},
    tests=(
        Expectation(
            "mean row", "norm of the mean row over the mean norm, coupled - Adam", -1, trial="mean cosine .01 - .29"
        ),
        Expectation("loss", "coupled - Adam, nats a token, below .01", -1, 0.01, trial="+.08"),
    ),
    measure=measure,
    minutes=2,
    note="One rate for both optimizers, that of Adam.",
)
