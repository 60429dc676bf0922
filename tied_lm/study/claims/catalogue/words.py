"""Words, where the model overfits: what tying does to the loss, at several widths."""

import dataclasses

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_WORDS
from tied_lm.study.claims.study import Expectation, Study, Value

WIDTHS = (16, 32, 64)  # at the small scale; the larger one has its own


def measure(r: Results) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name in r.compared:
        found[name] = r.difference(name, "tied")
        best = {arm: r.best_losses(name, arm) for arm in ("tied", "untied")}
        found[f"tied - untied at the best step of each, {name}"] = best["tied"] - best["untied"]
        found[f"loss of untied, {name}"] = r.losses(name, "untied")
        found[f"rise of untied after its best step, {name}"] = r.losses(name, "untied") - best["untied"]
    return found


STUDY = Study(
    name="words",
    claims="3, 4",
    claim="Tying lowers the held-out loss of LSTM models of words, at every width.",
    source="Press & Wolf 2017, arXiv:1608.05859; Inan et al. 2017, arXiv:1611.01462",
    settings={
        f"width {number}": dataclasses.replace(ON_WORDS, small=f"model.features={width}")
        for number, width in enumerate(WIDTHS, 1)
    },
    tests=tuple(
        Expectation(f"width {number}", f"tied - untied, nats a token, D = {width} at the small scale", -1)
        for number, width in enumerate(WIDTHS, 1)
    ),
    measure=measure,
    minutes=6,
    note="Words of the text that ships with Python, of which a twentieth is trained on, so that the model overfits; "
    "--text takes other files, as those of the Penn Treebank.",
)
