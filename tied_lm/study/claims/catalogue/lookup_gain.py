"""The lookup's gradient scaled up, beside a control in which both are."""

from tied_lm.intervals import COSINE, summarize
from tied_lm.model.geometry.likeness import compare_matrices
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES, Setting
from tied_lm.study.claims.study import Expectation, Study, Value

GAIN = Setting(
    "bytes",
    {
        "tied": "model.tying=tied",
        "lookup": "model.tying=path_weights scheme.lookup_weight=5",
        "both": "model.tying=path_weights scheme.lookup_weight=5 scheme.scoring_weight=5",
    },
    baseline="tied",
)


def measure(r: Results) -> dict[str, Value]:
    inputs = r.matrices("bytes", "untied")
    rho = {
        arm: [compare_matrices(a, b).likeness.spearman for a, b in zip(inputs, r.matrices("gain", arm), strict=True)]
        for arm in ("tied", "lookup")
    }
    return {
        "loss": r.difference("gain", "lookup"),
        "input": [a - b for a, b in zip(rho["lookup"], rho["tied"], strict=True)],
        "both x5 less tied, nats (a control: Adam does not see the scale of a gradient)": r.difference("gain", "both"),
        "rho with the untied input matrix, lookup x5": summarize(rho["lookup"], COSINE),
        "rho with the untied input matrix, tied": summarize(rho["tied"], COSINE),
    }


STUDY = Study(
    name="lookup-gain",
    claims="8",
    claim="Scaling the lookup's gradient by 5 makes the tied matrix more like an input matrix, and the loss no better.",
    source="Lopardo et al. 2026, arXiv:2603.26663",
    settings={"gain": GAIN, "bytes": ON_BYTES},
    tests=(
        Expectation("loss", "lookup x5 - tied, nats a token", 1, trial="+.0275 [+.0226, +.0323]"),
        Expectation("input", "rho with the untied input matrix, lookup x5 - tied", 1),
    ),
    measure=measure,
    minutes=3,
)
