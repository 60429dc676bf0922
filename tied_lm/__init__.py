"""The instrument for weight tying in language models: which rows the lookup moves, and which the scoring.

Rooms, each of which may import those below it: `cli`, `study`, `train`, then `data` and `record`, `config`, `model`,
then the modules that stand here.
"""

from typing import TYPE_CHECKING

from tied_lm.door import door

if TYPE_CHECKING:
    from tied_lm.model import geometry
    from tied_lm.model.embedding import TiedEmbedding, UntiedEmbedding
    from tied_lm.model.foreign import (
        embed_loss_and_gradients,
        embed_loss_and_parts,
        split_embed_gradients,
        split_table_gradients,
    )
    from tied_lm.model.parts import UseParts, UseSplit
    from tied_lm.model.split import GradientSplit, loss_and_gradients, row_stats, split_gradients
    from tied_lm.record.reader import open_run
    from tied_lm.record.rowrecorder import RowRecorder
    from tied_lm.rows import RowStats, TokenStats, UseStats
    from tied_lm.study.reading import open_comparison, open_sweep

__all__ = [
    "GradientSplit",
    "RowRecorder",
    "RowStats",
    "TiedEmbedding",
    "TokenStats",
    "UntiedEmbedding",
    "UseParts",
    "UseSplit",
    "UseStats",
    "embed_loss_and_gradients",
    "embed_loss_and_parts",
    "geometry",
    "loss_and_gradients",
    "open_comparison",
    "open_run",
    "open_sweep",
    "row_stats",
    "split_embed_gradients",
    "split_gradients",
    "split_table_gradients",
]
_, __getattr__, __dir__ = door(
    __name__,
    {
        "model": "geometry",
        "model.embedding": "TiedEmbedding UntiedEmbedding",
        "model.foreign": "embed_loss_and_gradients embed_loss_and_parts split_embed_gradients split_table_gradients",
        "model.parts": "UseParts UseSplit",
        "model.split": "GradientSplit loss_and_gradients row_stats split_gradients",
        "record.reader": "open_run",
        "record.rowrecorder": "RowRecorder",
        "study.reading": "open_comparison open_sweep",
        "rows": "RowStats TokenStats UseStats",
    },
)
