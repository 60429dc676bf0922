"""The push of rare rows scaled down."""

import numpy as np

from tied_lm.intervals import COSINE, summarize
from tied_lm.model.geometry.matrix import measure_matrix
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Study, Value

GATED = Setting("bytes", {"tied": "model.tying=tied", "gated": "model.tying=gated_rare_rows"}, baseline="tied")


def measure(r: Results) -> dict[str, Value]:
    found = {arm: [measure_matrix(m) for m in r.matrices("gated", arm)] for arm in ("tied", "gated")}
    cosine, rank = (
        {arm: np.array([getattr(one, name) for one in measured]) for arm, measured in found.items()}
        for name in ("mean_cosine", "effective_rank")
    )
    rare = {arm: r.band_losses("gated", arm, "4") for arm in ("tied", "gated")}
    return {
        "cosine": cosine["gated"] - cosine["tied"],
        "rank": rank["gated"] - rank["tied"],
        "loss": r.difference("gated", "gated"),
        **{f"mean cosine, {arm}": summarize(value, COSINE) for arm, value in cosine.items()},
        **{f"effective rank, {arm}": value for arm, value in rank.items()},
        "gated - tied in band 4, nats": rare["gated"] - rare["tied"],
    }


STUDY = Study(
    name="gate",
    claims="10",
    claim="One part of the rare rows' gradient degenerates the matrix; gating it helps.",
    source="Yu et al. 2022, arXiv:2109.03127",
    settings={"gated": GATED},
    tests=(
        Expectation("cosine", "mean cosine of all pairs of rows, gated - tied", -1),
        Expectation("rank", "effective rank, gated - tied", 1),
        Expectation("loss", "gated - tied, nats a token", -1),
    ),
    measure=measure,
    minutes=2,
    note="The gate scales by .1 the push that rows of band 4 and rarer get from tokens with a frequent target; the "
    "paper's own gate follows counts of recent tokens.",
)
