"""What a step is given."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class Batch(NamedTuple):
    inputs: Int[Array, "B L"]
    targets: Int[Array, "B L"]
    mask: Bool[Array, "B L"]  # False where a held-out batch is filled up
    fresh: Bool[Array, "B"]  # whether a row does not go on where that of the batch before ended
