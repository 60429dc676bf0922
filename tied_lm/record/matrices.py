"""The vocabulary's matrices as they are at some steps, one .npy file each."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float

from tied_lm.files import replace
from tied_lm.record.writer import Writer

MATRICES = "matrices"


def step_of(path: Path) -> int:
    """The step that a file is of."""
    return int(path.stem.rpartition("-")[2])


class Matrices(Writer):
    """Keeps matrices whole. Opening it removes those from `first_step` on."""

    def __init__(self, folder: Path, first_step: int, label: str = ""):
        self.place = folder / MATRICES
        for path in self.files():
            if step_of(path) >= first_step:
                path.unlink()

    def matrices(self, step: int, found: Mapping[str, Float[Array, "V D"]]) -> None:
        self.place.mkdir(exist_ok=True)
        for name, table_VxD in found.items():
            file = io.BytesIO()
            np.save(file, np.asarray(table_VxD, np.float32), allow_pickle=False)
            replace(self.place / f"{name}-{step:09d}.npy", file.getvalue())

    def files(self) -> list[Path]:
        return sorted(self.place.glob("*.npy"))
