"""The records of a log's chunks and those of its open block as one, read where they are asked for."""

from typing import Any

import numpy as np
import xarray
from jaxtyping import Float
from xarray.backends import BackendArray
from xarray.core import indexing


class Joined(BackendArray):
    """Records on the disk (R), and after them some in memory (T)."""

    def __init__(self, chunks: xarray.Variable, tail: Float[np.ndarray, "T V"]):
        self.chunks, self.tail = chunks, tail
        self.shape, self.dtype = (len(chunks) + len(tail), *chunks.shape[1:]), chunks.dtype

    def __getitem__(self, key: Any) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        first, *others = key
        wanted, length = np.atleast_1d(np.arange(self.shape[0])[first]), len(self.chunks)
        late, tail = wanted >= length, xarray.Variable(self.chunks.dims, self.tail)
        before = self.chunks[(wanted[~late], *others)].values
        found = np.empty((wanted.size, *before.shape[1:]), self.dtype)
        found[~late], found[late] = before, tail[(wanted[late] - length, *others)].values
        return found[0] if np.ndim(first) == 0 and not isinstance(first, slice) else found


def join(rows: xarray.Dataset, block: np.ndarray) -> xarray.Dataset:
    """A log with the records that follow those in its chunks, as `openblock.records_in` gives them."""
    lazily = {}
    for name in (block.dtype.names or ())[1:]:  # without the step
        chunks = rows.variables[name]
        lazily[name] = xarray.Variable(
            chunks.dims, indexing.LazilyIndexedArray(Joined(chunks, block[name])), chunks.attrs
        )
    steps = np.concatenate([rows["step"].values, block["step"]])
    found = rows.drop_vars([*lazily, "step"]).assign(lazily).assign_coords(step=("step", steps, rows["step"].attrs))
    found.set_close(rows.close)
    return found
