"""Tied for two thirds of the training, untied for the rest."""

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Study, Value

ARMS = {
    "tied": "model.tying=tied",
    "late": "model.tying=late_untie",
    "untied": "model.tying=untied",
}
LATE = Setting("bytes", ARMS, "scheme.untie_step=200", baseline="tied")


def measure(r: Results) -> dict[str, Value]:
    return {
        "tied": r.difference("bytes", "late"),
        "untied": r.losses("bytes", "late") - r.losses("bytes", "untied"),
        "untied - tied, nats": r.difference("bytes", "untied"),
    }


STUDY = Study(
    name="late-untie",
    claims="16",
    claim="Untying at two thirds of the training, Adam's moments copied, beats both tied and untied.",
    source="KellerJordan/modded-nanogpt, pull requests 175 and 178",
    settings={"bytes": LATE},
    tests=(
        Expectation("tied", "late - tied, nats a token", -1, trial="-.002"),
        Expectation("untied", "late - untied, nats a token", -1, trial="-.10"),
    ),
    measure=measure,
    minutes=3,
    note="At the larger scale they part at step 3,333.",
)
