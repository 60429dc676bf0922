"""The squared log-sum-exp in the loss, tied and untied."""

import numpy as np

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Study, Value

Z = Setting(
    "bytes",
    {
        "tied": "model.tying=tied",
        "tied_z": "model.tying=tied loss.z=0.001",
        "untied": "model.tying=untied",
        "untied_z": "model.tying=untied loss.z=0.001",
    },
    baseline="tied",
)


def measure(r: Results) -> dict[str, Value]:
    size = {arm: np.abs([one.log_sum_exp_mean for one in r.predictions("bytes", arm)]) for arm in Z.arms}
    cost = r.losses("bytes", "untied_z") - r.losses("bytes", "untied")
    tied_cost = r.difference("bytes", "tied_z")
    return {
        "tied": size["tied_z"] - size["tied"],
        "untied": size["untied_z"] - size["untied"],
        "loss": tied_cost,
        **{f"size of the mean log-sum-exp, {arm}": value for arm, value in size.items()},
        "cost of the z-loss untied, nats": cost,
    }


STUDY = Study(
    name="z-loss",
    claims="z-loss",
    claim="A z-loss holds the log-sum-exp of the logits near 0 and costs nothing, tied or not.",
    source="PaLM, arXiv:2204.02311",
    settings={"bytes": Z},
    tests=(
        Expectation("tied", "size of the mean log-sum-exp, with - without, tied", -1),
        Expectation("untied", "the same, untied", -1),
        Expectation("loss", "with - without, tied, nats a token, below .01", -1, 0.01),
    ),
    measure=measure,
    minutes=2,
    note="Weight 1e-3, ten times PaLM's, since the training is short.",
)
