"""What tying saves, spent on blocks."""

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES, TIED_AND_UNTIED, Setting
from tied_lm.study.claims.study import Expectation, Study, Value

DEEPER = Setting("bytes", TIED_AND_UNTIED, "compare.match=depth")


def measure(r: Results) -> dict[str, Value]:
    share = r.parameters("deeper", "tied") / r.parameters("deeper", "untied")
    return {
        "deeper": r.difference("deeper", "tied"),
        "free": r.difference("bytes", "tied"),
        "parameters of the deeper tied arm over those of untied": [share] * len(r.seeds("deeper")),
    }


STUDY = Study(
    name="depth",
    claims="18",
    claim="In small models tying is nearly free, and the parameters that it saves are better spent on depth.",
    source="MobileLLM 2024, second-hand",
    settings={"deeper": DEEPER, "bytes": ON_BYTES},
    tests=(
        Expectation("free", "tied - untied at one depth, nats a token, below .01", -1, 0.01, trial="-.10"),
        Expectation(
            "deeper", "tied and deeper - untied at about one number of parameters, nats a token", -1, trial="0"
        ),
    ),
    measure=measure,
    minutes=4,
)
