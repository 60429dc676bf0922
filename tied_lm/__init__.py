"""The instrument for weight tying in language models: which rows the lookup moves, and which the scoring."""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tied_lm.embedding import TiedEmbedding, UntiedEmbedding
    from tied_lm.gradients import GradientSplit, loss_and_gradients, row_stats, split_gradients
    from tied_lm.recorder import RowRecorder
    from tied_lm.rows import RowStats, UseStats
    from tied_lm.runs import open_run
    from tied_lm.uses import UseSplit, embed_loss_and_gradients, split_embed_gradients, split_table_gradients

__all__ = [
    "GradientSplit",
    "RowRecorder",
    "RowStats",
    "TiedEmbedding",
    "UntiedEmbedding",
    "UseSplit",
    "UseStats",
    "embed_loss_and_gradients",
    "loss_and_gradients",
    "open_run",
    "row_stats",
    "split_embed_gradients",
    "split_gradients",
    "split_table_gradients",
]


def __getattr__(name: str) -> object:
    # On demand, so that what needs no arrays (reading a config, --help) does not wait for the libraries.
    if name in __all__:
        for module in ("embedding", "gradients", "recorder", "runs", "uses"):
            found = importlib.import_module(f"tied_lm.{module}")
            if name in vars(found):
                return vars(found)[name]
    if not name.startswith("_") and importlib.util.find_spec(f"tied_lm.{name}"):
        return importlib.import_module(f"tied_lm.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
