"""Gradient descent and Adam on rare tokens, each at its own best rate."""

import numpy as np

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Study, Value
from tied_lm.study.ownbest import at_own_best

RATES = {"adam": (0.005, 0.02, 0.08), "sgd": (3.0, 10.0, 30.0, 100.0)}
ARMS = {
    f"{name}{number}": f"model.tying=tied optimizer.name={name} optimizer.learning_rate={rate}"
    for name, rates in RATES.items()
    for number, rate in enumerate(rates)
}
WIDE = Setting("toy", ARMS, "data.vocab_size=2048", baseline="adam1")


def measure(r: Results) -> dict[str, Value]:
    trained = {
        name: [f"{name}{n}" for n in range(len(rates)) if f"{name}{n}" in r.compared["toy"].summary.arms]
        for name, rates in RATES.items()
    }
    losses = {name: np.array([r.losses("toy", arm) for arm in arms]) for name, arms in trained.items()}
    found: dict[str, Value] = {}
    excess = {}
    for band in ("0", "4"):
        measured = {
            name: at_own_best(losses[name], np.array([r.band_losses("toy", arm, band) for arm in arms]))
            for name, arms in trained.items()
        }
        excess[band] = measured["sgd"] - measured["adam"]
        found |= {f"loss in band {band}, {name}, nats": value for name, value in measured.items()}
    ratio = {
        name: at_own_best(
            losses[name],
            np.array([[one.log_ratio_by_band["4"] for one in r.predictions("toy", arm)] for arm in arms]),
        )
        for name, arms in trained.items()
    }
    return found | {
        "rare": excess["4"],
        "more": excess["4"] - excess["0"],
        "ratio": ratio["adam"] - ratio["sgd"],
        "sgd - adam in band 0, nats": excess["0"],
        **{f"mean log(p/f) in band 4, {name}": value for name, value in ratio.items()},
        **{f"mean loss of {arm}": r.losses("toy", arm) for arms in trained.values() for arm in arms},
    }


STUDY = Study(
    name="optimizers",
    claims="11, 12",
    claim="Gradient descent is slow on rare tokens and Adam is not; but Adam predicts rare tokens too seldom.",
    source="Kunstner et al. 2024, arXiv:2402.19449; arXiv:2609.37535, second-hand",
    settings={"toy": WIDE},
    tests=(
        Expectation("rare", "loss in band 4, SGD - Adam, nats", 1, 0.01, trial="+.19 over all bands"),
        Expectation("more", "that, less the same in band 0", 1),
        Expectation("ratio", "mean log(p/f) in band 4, Adam - SGD", -1, trial="-2.7 + .2 in the paper"),
    ),
    measure=measure,
    minutes=8,
    note="Rates: Adam .005, .02, .08; SGD 3, 10, 30, 100. Half of the seeds choose a rate by the mean loss, the others "
    "are measured at it, in turn.",
)
