"""Summaries of comparisons that never were."""

import dataclasses

from tests import tiny
from tied_lm.intervals import Difference, HeldoutEstimate, outcome
from tied_lm.study.heldout import ClusterCount
from tied_lm.study.summary import ArmSummary, BandSummary, Split, Summary

OPTIMIZER = dataclasses.replace(
    tiny.make_config().optimizer, schedule="cosine", learning_rate=0.01, vocab_learning_rate=0.0
)


def estimate(mean, ci95=None):
    return HeldoutEstimate(mean, ci95, (mean,))


def arm(parameters, loss, tied):
    account = {"vocabulary": parameters, "body": 0, "saved": 100 * tied, "parameter_bytes": 400, "optimizer_bytes": 804}
    split = {"share": estimate(0.2), "cosine": estimate(-0.5)} if tied else {}
    return ArmSummary(
        eval_loss=estimate(loss),
        excess=estimate(loss - 4.0),
        parameters=parameters,
        account=account,
        tied=tied,
        body="none",
        clipped=0.25,
        split=Split(**split) if tied else None,
        bands={"0": BandSummary(**split, rows=10, frequency=1.0, loss=estimate(loss))},
        optimizer=OPTIMIZER,
        steps=1000,
    )


def difference(mean, ci95, seeds_to_decide=40):
    return Difference(
        mean,
        None if ci95 is None else (-7, 7),  # the unadjusted interval is another one, which no sentence shows
        (mean,),
        (-9, 9),
        ci95,
        None if ci95 is None else outcome(*ci95, 0.01),
        seeds_to_decide,
    )


def summary(ci95, mean=0.01, seeds=5, **decided):
    return Summary(
        entropy=4.0,
        law_loss=4.01,
        arms={"tied": arm(100, 4.2 + mean, True), "untied": arm(200, 4.2, False)},
        baseline="untied",
        differences={"tied": difference(mean, ci95, **decided)},
        seeds=tuple(range(seeds)),
        margin=0.01,
        looks=(seeds,),
        clusters=ClusterCount("block", 32),
        eval_tokens=65536,
        probe_tokens=32768,
        arms_differ_in=("model.tying",),
        versions={},
    )


def with_arms(made, **changes):
    """A summary with changes to all of its arms."""
    arms = {name: dataclasses.replace(one, **changes) for name, one in made.arms.items()}
    return dataclasses.replace(made, arms=arms)
