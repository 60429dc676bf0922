"""Where similar contexts mean similar tokens, and where they do not."""

import numpy as np

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import TIED_AND_UNTIED, Setting
from tied_lm.study.claims.study import Expectation, Study, Value

KNOB = (0.0, 0.5, 1.0)


def measure(r: Results) -> dict[str, Value]:
    per_seed = {name: np.array(r.difference(name, "tied").per_seed, np.float64) for name in r.compared}
    return {
        "directed": r.difference("0.0", "tied"),
        "reversible": r.difference("1.0", "tied"),
        "order": np.minimum(per_seed["0.0"] - per_seed["0.5"], per_seed["0.5"] - per_seed["1.0"]),
        "tied - untied at reversibility .5, nats": r.difference("0.5", "tied"),
    }


STUDY = Study(
    name="reversibility",
    claims="14",
    claim="Tying fits data in which similar contexts mean similar tokens, and hurts otherwise.",
    source="Bertolotti & Cazzola, ICML 2024",
    settings={str(knob): Setting("toy", TIED_AND_UNTIED, f"data.reversibility={knob}") for knob in KNOB},
    tests=(
        Expectation("directed", "tied - untied on a directed chain, nats a token", 1, 0.01, trial="+.848"),
        Expectation("reversible", "tied - untied on a reversible chain, below .02", -1, 0.02, trial="+.016"),
        Expectation(
            "order", "the smaller of the two steps of the difference from directed to reversible", 1, trial="+.35"
        ),
    ),
    measure=measure,
    minutes=2,
    note="Without a body: with one the price of a directed chain goes.",
)
