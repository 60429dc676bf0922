"""The comparisons that studies are made of: overrides of a base, small, or larger for an accelerator."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tied_lm.config import completed, defaults, override, put

SEED = 1000  # the first; nothing was tuned at these seeds
SEEDS = 5
# What all have: five seeds, no files that no study reads, the matrices at ten steps.
SHARED = f"seed={SEED} compare.seeds={SEEDS} log.writers= log.rows_every=100000 checkpoint.keep=100"

TOY = "checkpoint.every=100 log.probe_tokens=4096 data.eval_tokens=32768"
BYTES = (
    "data.source=text model.body=transformer body.depth=2 model.features=32 data.batch_size=16 data.length=32 "
    "optimizer.learning_rate=0.005 optimizer.warmup_steps=30 train.steps=300 train.eval_every=30 checkpoint.every=30 "
    "log.probe_tokens=4096 data.eval_tokens=32768"
)
# Few files to train on, so that the model overfits as it does on the Penn Treebank.
WORDS = (
    "data.source=text data.tokenizer=words data.vocab_size=3000 data.heldout_fraction=0.95 model.body=lstm "
    "body.depth=1 body.dropout=0.2 model.features=32 data.batch_size=16 data.length=32 optimizer.learning_rate=0.01 "
    "optimizer.warmup_steps=30 train.steps=500 train.eval_every=50 checkpoint.every=500 log.probe_tokens=2048 "
    "data.eval_tokens=16384"
)
BASES = {"toy": TOY, "bytes": BYTES, "words": WORDS}

LARGER = {
    "toy": "model.features=64 data.vocab_size=2048 train.steps=4000 checkpoint.every=400 data.batch_size=128",
    "bytes": (
        "model.features=256 body.depth=6 data.batch_size=64 data.length=256 train.steps=5000 train.eval_every=500 "
        "checkpoint.every=500 optimizer.learning_rate=0.001 optimizer.warmup_steps=500 log.probe_tokens=32768 "
        "data.eval_tokens=262144 scheme.untie_step=3333"
    ),
    "words": (
        "data.vocab_size=10000 data.heldout_fraction=0.1 model.features=200 body.depth=2 data.batch_size=32 "
        "train.steps=5000 train.eval_every=500 checkpoint.every=5000 optimizer.learning_rate=0.003"
    ),
}
SCALES = ("small", "base")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One comparison: a base, what is changed in it, and its arms."""

    base: str  # toy | bytes | words
    arms: Mapping[str, str]
    overrides: str = ""  # at both scales, but for what the larger one sets
    small: str = ""  # at the small one alone
    baseline: str = "untied"

    def values(self, scale: str, text: tuple[str, str] | None = None) -> dict[str, Any]:
        """Nested values of its config.

        Args:
            scale: one of `SCALES`.
            text: files to train on and files that are held out, for words.
        """
        values = completed({}, defaults())
        own = (LARGER[self.base],) if scale == "base" else (self.small,)
        # At the larger scale its sizes win over those that a study sets for the small one.
        for item in " ".join((SHARED, BASES[self.base], self.overrides, *own)).split():
            override(values, *item.split("=", 1))
        if self.base == "words" and text is not None:
            for field, path in zip(("data.paths", "data.heldout_paths"), text, strict=True):
                put(values, field, (path,))
        values["compare"] |= {"arms": dict(self.arms), "baseline": self.baseline}
        return values


TIED_AND_UNTIED = {"tied": "model.tying=tied", "untied": "model.tying=untied"}
ON_TOY = Setting("toy", TIED_AND_UNTIED)
ON_BYTES = Setting("bytes", TIED_AND_UNTIED)
ON_WORDS = Setting("words", TIED_AND_UNTIED)
