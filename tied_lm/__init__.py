"""The instrument for weight tying in language models: which rows the lookup moves, and which the scoring."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tied_lm.embedding import TiedEmbedding, UntiedEmbedding
    from tied_lm.gradients import GradientSplit, RowStats, loss_and_gradients, row_stats, split_gradients
    from tied_lm.runs import open_run

__all__ = [
    "GradientSplit",
    "RowStats",
    "TiedEmbedding",
    "UntiedEmbedding",
    "loss_and_gradients",
    "open_run",
    "row_stats",
    "split_gradients",
]


def __getattr__(name: str) -> object:
    # On demand, so that what needs no arrays (reading a config, --help) does not wait for the libraries.
    if name in __all__:
        for module in ("embedding", "gradients", "runs"):
            found = importlib.import_module(f"tied_lm.{module}")
            if name in vars(found):
                return vars(found)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
