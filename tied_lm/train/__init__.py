"""One run: what its config describes, the step, the optimizer, the loop and its checkpoints.

May import model, data, record and the root.
"""

from tied_lm.door import door

__all__, __getattr__, __dir__ = door(
    __name__,
    {
        "build": "build_model build_body build_stream",
        "step": "Trainer TrainState",
        "loop": "train_run",
        "checkpoint": "Checkpoints",
    },
)
