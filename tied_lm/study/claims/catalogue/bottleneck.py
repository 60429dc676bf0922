"""How much of the gradient in the logits a scoring matrix lets through."""

import numpy as np

from tied_lm.intervals import SHARE, summarize
from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES, TIED_AND_UNTIED, Setting
from tied_lm.study.claims.study import Expectation, Study, Value

WIDE = Setting("toy", TIED_AND_UNTIED, "data.vocab_size=2048")


def measure(r: Results) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for setting in ("toy", "bytes"):
        for arm in ("tied", "untied"):
            predicted = r.predictions(setting, arm)
            share = np.array([one.column_space_share for one in predicted])
            found[f"share in the column space, {setting}, {arm}"] = summarize(share, SHARE)
            if arm == "tied":
                chance = predicted[0].column_space_share_by_chance
                found[f"D/V, {setting}"] = np.full(share.size, chance)
                found[setting] = share - chance
                found[f"{setting} lost"] = 1 - share
    return found


STUDY = Study(
    name="bottleneck",
    claims="17",
    claim="The scoring matrix is a gradient bottleneck: most of the gradient in the logits is lost in it.",
    source="Godey & Artzi 2026, arXiv:2603.10145; contested by arXiv:2608.16671",
    settings={"toy": WIDE, "bytes": ON_BYTES},
    tests=(
        Expectation("toy lost", "share of |p - y|^2 outside the column space, toy stream", 1, 0.5, trial=".986"),
        Expectation("bytes lost", "the same, Transformer on bytes", 1, 0.5),
        Expectation("toy", "share inside, less D/V of a random direction, toy stream", -1, trial=".0143 - .0156"),
        Expectation("bytes", "the same, Transformer on bytes", -1),
    ),
    measure=measure,
    minutes=3,
    note="Of the tied arm, at the last step, on one held-out batch. That it is lost does not say that it would help.",
)
