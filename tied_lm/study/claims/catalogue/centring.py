"""The mean row subtracted from the matrix after each update."""

import numpy as np

from tied_lm.model.geometry.matrix import measure_matrix
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Study, Value

ARMS = {
    "tied": "model.tying=tied",
    "centred": "model.tying=centred",
    "tied_high": "model.tying=tied optimizer.learning_rate=0.02",
    "centred_high": "model.tying=centred optimizer.learning_rate=0.02",
}
CENTRED = Setting("bytes", ARMS, baseline="tied")


def measure(r: Results) -> dict[str, Value]:
    logit = {arm: np.array([one.largest_logit_max for one in r.predictions("bytes", arm)]) for arm in ARMS}
    size = {arm: np.abs([one.log_sum_exp_mean for one in r.predictions("bytes", arm)]) for arm in ARMS}
    return {
        "drift": size["centred"] - size["tied"],
        "logit": logit["centred"] - logit["tied"],
        "loss": r.difference("bytes", "centred"),
        "high": r.losses("bytes", "centred_high") - r.losses("bytes", "tied_high"),
        **{f"largest logit, {arm}": value for arm, value in logit.items()},
        **{f"size of the mean log-sum-exp, {arm}": value for arm, value in size.items()},
        **{
            f"norm of the mean row, {arm}": [measure_matrix(matrix).mean_row for matrix in r.matrices("bytes", arm)]
            for arm in ARMS
        },
    }


STUDY = Study(
    name="centring",
    claims="20",
    claim="Centring the output embeddings stops the drift of the logits, and training at high rates is better for it.",
    source="arXiv:2601.02031",
    settings={"bytes": CENTRED},
    tests=(
        Expectation("drift", "size of the mean log-sum-exp, centred - tied", -1),
        Expectation("logit", "largest logit, centred - tied", -1),
        Expectation("loss", "centred - tied, nats a token, below .01", -1, 0.01),
        Expectation("high", "the same at four times the rate, nats a token", -1),
    ),
    measure=measure,
    minutes=4,
    note="Of a tied matrix. Untied, what is subtracted from the output matrix changes neither the loss nor its "
    "gradients, since a softmax does not see what all logits share.",
)
