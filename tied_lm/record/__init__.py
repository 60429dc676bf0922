"""What a run leaves behind, written and read back: rows, scalars, TensorBoard's events, and what vouches for them.

May import the config and the root; it knows no model and no stream.
"""

from tied_lm.door import door

__all__, __getattr__, __dir__ = door(
    __name__,
    {
        "rowrecorder": "RowRecorder",
        "reader": "Run open_run",
        "scalars": "read_metrics is_finished",
    },
)
