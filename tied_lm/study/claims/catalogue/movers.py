"""Which use moves the rows of a tied matrix."""

import numpy as np
from jaxtyping import Float

from tied_lm.intervals import SHARE, summarize
from tied_lm.model.geometry.shares import Shares, measure_shares
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES
from tied_lm.study.claims.study import Expectation, Study, Value


def _shares(r: Results, step: int | None) -> list[Shares]:
    batch, model = r.batch("bytes", "tied"), r.compared["bytes"].plan.arms["tied"].trainer.model
    return [
        measure_shares(model, r.params("bytes", "tied", seed, step), batch.inputs, batch.targets)
        for seed in r.seeds("bytes")
    ]


def measure(r: Results) -> dict[str, Value]:
    first, *_, last = r.steps("bytes", "tied")[1:]
    found: dict[str, Value] = {}
    scoring: dict[str, Float[np.ndarray, "S"]] = {}
    for phase, step in (("early", first), ("late", last)):
        shares = _shares(r, step)
        for name in ("squared", "unsquared", "squared_before_scatter", "unsquared_before_scatter"):
            of_seeds = [1 - getattr(s, name) for s in shares]
            found[f"scoring's {name.replace('_', ' ')} share at step {step}"] = summarize(of_seeds, SHARE)
        scoring[phase] = np.array([0.5 - s.squared for s in shares])
    return found | scoring | {"fall": scoring["early"] - scoring["late"]}


STUDY = Study(
    name="movers",
    claims="1, 5",
    claim="A tied row mostly gets the scoring's update, most of all early in training.",
    source="Press & Wolf 2017, arXiv:1608.05859; Lopardo et al. 2026, arXiv:2603.26663",
    settings={"bytes": ON_BYTES},
    tests=(
        Expectation(
            "early", "scoring's squared share in a tenth of the training, less one half", 1, trial=".93 to .99 - .5"
        ),
        Expectation("late", "the same at the last step", 1, trial=".31 to .43 - .5"),
        Expectation("fall", "the first less the second", 1, trial="+.5 to +.7"),
    ),
    measure=measure,
    minutes=2,
    note="Shares of one held-out batch of 512 tokens (small scale): they fall with its size.",
)
