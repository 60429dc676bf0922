"""The instrument for weight tying in language models: which rows the lookup moves, and which the scoring."""

from tied_lm.embedding import TiedEmbedding, UntiedEmbedding
from tied_lm.gradients import GradientSplit, RowStats, loss_and_gradients, row_stats, split_gradients

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
    if name == "open_run":  # on demand: reading runs back needs xarray, which takes a second to import
        from tied_lm.runs import open_run

        return open_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
