"""Whether it is the rare tokens that gain by a matrix of their own for the scoring."""

from tied_lm.study.claims.results import Results
from tied_lm.study.claims.setting import ON_BYTES, ON_WORDS
from tied_lm.study.claims.study import Expectation, Study, Value


def measure(r: Results) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for setting in ("words", "bytes"):
        gain = {
            band: r.band_losses(setting, "tied", band) - r.band_losses(setting, "untied", band) for band in ("0", "4")
        }
        found[setting] = gain["4"] - gain["0"]
        found |= {f"gain of untying in band {band}, {setting}, nats": value for band, value in gain.items()}
    return found


STUDY = Study(
    name="rare-tokens",
    claims="21",
    claim="Rare tokens gain most from decoupling input and output.",
    source="arXiv:2601.22040",
    settings={"words": ON_WORDS, "bytes": ON_BYTES},
    tests=(
        Expectation("words", "gain of untying (tied - untied) in band 4 less that in band 0, LSTM on words, nats", 1),
        Expectation("bytes", "the same, Transformer on bytes", 1),
    ),
    measure=measure,
    minutes=3,
    note="Untied stands for the paper's decoupled head. Intervals are over seeds, at these held-out tokens.",
)
