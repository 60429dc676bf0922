"""What every place has in common in which the scalars, histograms and texts of a run are written."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float, Int


class Writer:
    """One place. What it has no use for, it leaves out.

    Opening it cuts off everything from `first_step` on, since that will be written again. Steps come in order, each
    once; NaN stands for what is undefined.

    Args:
        label: part of the names of its files, in a folder where others write such files, too.
    """

    def __init__(self, folder: Path, first_step: int, label: str = ""): ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values by tag, whatever is in the tags."""

    def histogram(self, step: int, tag: str, counts: Int[np.ndarray, "bins"]) -> None:
        """How many rows have a norm whose log10 lies between two of `histogram.EDGES`."""

    def matrices(self, step: int, found: Mapping[str, Float[Array, "V D"]]) -> None:
        """The vocabulary's matrices as they are, by name."""

    def text(self, tag: str, markdown: str) -> None:
        """What is said once."""

    def name_tokens(self, strings: Mapping[str, str]) -> None:
        """Tokens whose rows are followed as curves, by the name of the curve. Said each time it is opened."""

    def charts(self, layout: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Tags that belong into one chart, by category and title."""

    def files(self) -> list[Path]:
        """Its files, which only grow: so they can be vouched for."""
        return []

    def flush(self) -> None:
        """Hand everything to the disk."""

    def close(self) -> None:
        """Flush, and let go of the files."""
