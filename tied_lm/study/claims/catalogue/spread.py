"""Initial values of standard deviation 1."""

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import Setting
from tied_lm.study.claims.study import Expectation, Study, Value

SPREAD = Setting(
    "bytes",
    {
        "tied": "model.tying=tied",
        "wide": "model.tying=tied model.init_std=1",
        "untied": "model.tying=untied",
        "untied_wide": "model.tying=untied model.init_std=1",
    },
    baseline="tied",
)


def measure(r: Results) -> dict[str, Value]:
    wide, untied_wide = r.losses("bytes", "wide"), r.losses("bytes", "untied_wide")
    costs = {
        "tied": wide - r.losses("bytes", "tied"),
        "untied": untied_wide - r.losses("bytes", "untied"),
    }
    first = {arm: [run.scalars("loss/eval")[0] for run in r.runs("bytes", arm)] for arm in ("tied", "wide")}
    return {
        "tied": r.difference("bytes", "wide"),
        "more": costs["tied"] - costs["untied"],
        "the same for untied": costs["untied"],
        "tied - untied, both at spread 1": wide - untied_wide,
        "initial loss, spread .02": first["tied"],
        "initial loss, spread 1": first["wide"],
    }


STUDY = Study(
    name="spread",
    claims="15",
    claim="Tied arms lose where the initial values are those of a lookup table alone (standard deviation 1).",
    source="a blog post of 2026, second-hand",
    settings={"bytes": SPREAD},
    tests=(
        Expectation("tied", "tied at spread 1 - tied at .02, nats a token", 1, 0.01, trial="+.79"),
        Expectation("more", "that, less the same for untied", 1),
    ),
    measure=measure,
    minutes=4,
)
