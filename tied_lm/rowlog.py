"""The history of every row, as a zarr group that xarray opens."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import Float

STEPS_IN_CHUNK = 64
STEPS_IN_BLOCK = 32  # written at once; half a chunk, to hold less in memory
TOKENS_IN_CHUNK = 4096
STRINGS = "strings"


class RowLog:
    """Arrays (step, token), one for each field, and the coordinates `step` and `token`; or over another dimension.

    Records are written in blocks. The group's metadata, which hold the shapes, are replaced in one go, once the records
    are there, so that a reader never sees arrays of different lengths.
    """

    def __init__(
        self,
        folder: Path,
        fields: Mapping[str, dict[str, Any]],
        constants: Mapping[str, Float[np.ndarray, "V"]],
        first_step: int,
        token_strings: Sequence[str] = (),
        dimension: str = "token",
    ):
        """Create the group, or open it and cut off everything from `first_step` on.

        Args:
            fields: attributes by the name of the field.
            constants: values of each row that do not change.
            token_strings: an attribute of `token`, since zarr has no strings that every reader knows.
            dimension: what a record has a value for each of.
        """
        self.folder, self.dimension = folder, dimension
        (vocab_size,) = {values.size for values in constants.values()}
        self.pending: list[tuple[int, dict[str, Float[np.ndarray, "V"]]]] = []
        self.arrays = {
            name: self._open(name, ("step", dimension), (0, vocab_size), "float32", a) for name, a in fields.items()
        }
        steps = self._open("step", ("step",), (0,), "int64", {"units": "updates"})
        if not (folder / "zarr.json").exists():
            for name, values in {dimension: np.arange(vocab_size), **constants}.items():
                kind = "int64" if values.dtype.kind == "i" else "float64"
                attributes = {STRINGS: list(token_strings)} if name == dimension and token_strings else {}
                self._open(name, (dimension,), values.shape, kind, attributes).write(values.astype(kind)).result()
        self.arrays["step"] = steps  # last, here and in every resize
        kept = np.asarray(steps[: self._length()].read().result())
        self._cut(int(np.searchsorted(kept, first_step)))

    def _open(
        self, name: str, dimensions: tuple[str, ...], shape: tuple[int, ...], kind: str, attributes: dict[str, Any]
    ) -> Any:
        chunk = [{"step": STEPS_IN_CHUNK, self.dimension: min(shape[-1], TOKENS_IN_CHUNK)}[d] for d in dimensions]
        metadata = {
            "data_type": kind,
            "shape": shape,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
            ],
            "dimension_names": dimensions,
            "attributes": attributes,
        }
        store = {"driver": "file", "path": str(self.folder.absolute() / name)}
        path = self.folder / name / "zarr.json"
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": store}
        return ts.open(
            spec if path.exists() else spec | {"metadata": metadata}, open=True, create=not path.exists()
        ).result()

    def _length(self) -> int:
        """Records that the group's metadata vouch for."""
        path = self.folder / "zarr.json"
        return (
            json.loads(path.read_text(encoding="utf-8"))["consolidated_metadata"]["metadata"]["step"]["shape"][0]
            if path.exists()
            else 0
        )

    def _cut(self, length: int) -> None:
        """Cut off what lies past `length` records. A reader must not see them go, so this is published first."""
        self.length = length
        self._publish()
        for name, array in self.arrays.items():
            bounds = [length] if name == "step" else [length, None]
            self.arrays[name] = array.resize(exclusive_max=bounds).result()

    def _publish(self) -> None:
        metadata = {
            path.parent.name: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(self.folder.glob("*/zarr.json"))
        }
        for name in self.arrays:
            metadata[name]["shape"][0] = self.length
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": metadata},
        }
        new = self.folder / "zarr.json.new"
        new.write_text(json.dumps(group), encoding="utf-8")
        os.replace(new, self.folder / "zarr.json")

    def append(self, step: int, row_values: Mapping[str, Float[np.ndarray, "V"]]) -> None:
        """Add the record of a step; it is on disk after the next `flush`, or once a block is full."""
        self.pending.append((step, dict(row_values)))
        if (self.length + len(self.pending)) % STEPS_IN_BLOCK == 0:
            self.flush()

    def flush(self) -> None:
        """Write the pending records."""
        if not self.pending:
            return
        start, end = self.length, self.length + len(self.pending)
        writes = []
        for name, array in self.arrays.items():
            values = [step if name == "step" else record[name] for step, record in self.pending]
            array = array.resize(exclusive_max=[end] if name == "step" else [end, None]).result()
            self.arrays[name] = array
            writes.append(array[start:end].write(np.asarray(values, array.dtype.numpy_dtype)))
        for write in writes:
            write.result()
        self.length, self.pending = end, []
        self._publish()
