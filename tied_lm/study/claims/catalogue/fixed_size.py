"""Tied and wider against untied, with one number of parameters."""

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import TIED_AND_UNTIED, Setting
from tied_lm.study.claims.study import Expectation, Study, Value

WIDER = Setting("bytes", TIED_AND_UNTIED, "compare.match=parameters")


def measure(r: Results) -> dict[str, Value]:
    return {"loss": r.difference("bytes", "tied")}


STUDY = Study(
    name="fixed-size",
    claims="25",
    claim="At a fixed number of parameters, small models are better untied.",
    source="openai/parameter-golf, pull request 2000",
    settings={"bytes": WIDER},
    tests=(Expectation("loss", "tied and wider - untied, nats a token", 1),),
    measure=measure,
    minutes=2,
    note="The claim is of a fixed number of bytes of the compressed weights; here it is the number of parameters.",
)
