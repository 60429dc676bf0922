"""The history of every row, as a zarr group that xarray opens."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import tensorstore as ts
from jaxtyping import Float, Num

from tied_lm.files import AGAIN, Damaged, checksum, refused, replace, sync_folders

STEPS_IN_CHUNK = 32  # held in memory until they are full, so that most are written once
TOKENS_IN_CHUNK = 4096
STRINGS = "strings"

Read = Callable[[Any], np.ndarray]


def crc_of(array: Any, length: int | None, read: Read) -> int:
    """CRC-32C of the values of the first records, or of all; a block is read at a time."""
    crc, end = 0, array.shape[0] if length is None else length
    for start in range(0, end, STEPS_IN_CHUNK) if array.ndim == 2 else (0,):
        part = array[start : min(start + STEPS_IN_CHUNK, end) if array.ndim == 2 else end]
        crc = int(crc32c.crc32c(np.ascontiguousarray(read(part)).tobytes(), crc))
    return crc


def _fixed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Zarr's metadata without the number of records."""
    return {
        name: values | {"shape": values["shape"][1:]} if values["dimension_names"][0] == "step" else values
        for name, values in sorted(metadata.items())
    }


def check(
    folder: Path, entry: Mapping[str, Any], metadata: Mapping[str, Any], arrays: Mapping[str, Any], read: Read
) -> None:
    """Compare a log with its entry in the manifest.

    Args:
        metadata: zarr's, by array.
        arrays: by name.
        read: the values of a part of an array.

    Raises:
        Damaged: it is not what was written.
    """
    with readable(folder):
        wrong = [] if checksum(_fixed(metadata)) == entry["metadata"] else ["metadata"]
        for name, crc in entry["arrays"].items():
            length = entry["length"] if metadata[name]["dimension_names"][0] == "step" else None
            if name not in arrays or arrays[name].shape[0] < (length or 0) or crc_of(arrays[name], length, read) != crc:
                wrong.append(name)
    if wrong:
        raise Damaged(f"{folder} is damaged (the checksum of {', '.join(wrong)} differs); {AGAIN}")


def metadata_in(folder: Path) -> dict[str, Any]:
    """Zarr's metadata by array."""
    return {
        path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/zarr.json"))
    }


def verify(folder: Path, entry: Mapping[str, Any]) -> None:
    """Compare a log that is to be continued with its entry in the manifest.

    Raises:
        Damaged: it is not what was written.
    """
    with readable(folder):
        metadata = metadata_in(folder)
        stores = {name: {"driver": "file", "path": str(folder.absolute() / name)} for name in metadata}
        arrays = {name: ts.open({"driver": "zarr3", "kvstore": store}).result() for name, store in stores.items()}
        check(folder, entry, metadata, arrays, lambda part: part.read().result())


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Say in one line what is wrong with a log that cannot be read."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise
        raise Damaged(f"{folder} is damaged ({error}); {AGAIN}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, Damaged):
            raise
        if reported := refused(folder, error):
            raise reported from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Damaged(f"{folder} is damaged ({reason}); {AGAIN}") from error


class RowLog:
    """Arrays (step, token), one for each field, and the coordinates `step` and `token`; or over another dimension.

    Records are written chunk by chunk. The group's metadata, which hold the shapes, are replaced in one go, once the
    records are there, so that a reader never sees arrays of different lengths.
    """

    def __init__(
        self,
        folder: Path,
        fields: Mapping[str, dict[str, Any]],
        constants: Mapping[str, Num[np.ndarray, "V"]],
        first_step: int,
        token_strings: Sequence[str] = (),
        dimension: str = "token",
        length: int | None = None,
    ):
        """Create the group, or open it and cut off everything from `first_step` on.

        Args:
            fields: attributes by the name of the field.
            constants: values of each row that do not change.
            token_strings: an attribute of `token`, since zarr has no strings that every reader knows.
            dimension: what a record has a value for each of.
            length: records that are there; by default those that the group tells of.

        Raises:
            Damaged: it cannot be read.
        """
        if not first_step and folder.exists():
            shutil.rmtree(folder)
        self.folder, self.dimension = folder, dimension
        with readable(folder):
            self._open_all(fields, constants, first_step, token_strings, length)

    def _open_all(
        self,
        fields: Mapping[str, dict[str, Any]],
        constants: Mapping[str, Num[np.ndarray, "V"]],
        first_step: int,
        token_strings: Sequence[str],
        length: int | None,
    ) -> None:
        folder = self.folder
        for left in folder.rglob("*.__lock"):  # by a kill; tensorstore would write over its start only
            left.unlink()
        (vocab_size,) = {values.size for values in constants.values()}
        self.pending: list[tuple[int, dict[str, Float[np.ndarray, "V"]]]] = []
        self.arrays = {
            name: self._open(name, ("step", self.dimension), (0, vocab_size), "float32", attributes)
            for name, attributes in fields.items()
        }
        steps = self._open("step", ("step",), (0,), "int64", {"units": "updates"})
        if not (folder / "zarr.json").exists():
            for name, values in {self.dimension: np.arange(vocab_size), **constants}.items():
                kind = "int64" if values.dtype.kind == "i" else "float64"
                attributes = {STRINGS: list(token_strings)} if name == self.dimension and token_strings else {}
                self._open(name, (self.dimension,), values.shape, kind, attributes).write(values.astype(kind)).result()
        self.arrays["step"] = steps  # last, here and in every resize
        self.constants = metadata_in(self.folder).keys() - self.arrays.keys()
        length = self._length() if length is None else length
        kept = np.asarray(steps[:length].read().result())
        length = int(np.searchsorted(kept, first_step))
        sync_folders(self.folder)
        self.crcs = {
            name: crc_of(array, length, lambda part: part.read().result()) for name, array in self.arrays.items()
        }
        for name in self.constants:
            self.crcs[name] = crc_of(self._constant(name), None, lambda part: part.read().result())
        self._cut(length)

    def _constant(self, name: str) -> Any:
        """An array that is there."""
        return self._open(name, (self.dimension,), (0,), "", {})

    def entry(self) -> dict[str, Any]:
        """What the manifest holds of it: the number of records, and checksums of the values and of the metadata."""
        return {
            "length": self.length,
            "metadata": checksum(_fixed(metadata_in(self.folder))),
            "arrays": dict(self.crcs),
        }

    @property
    def kept_steps(self) -> list[int]:
        """The steps that are written."""
        return np.asarray(self.arrays["step"][: self.length].read().result()).tolist()

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
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": store, "store_data_equal_to_fill_value": True}
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
        metadata = metadata_in(self.folder)
        for name in self.arrays:
            metadata[name]["shape"][0] = self.length
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": metadata},
        }
        replace(self.folder / "zarr.json", json.dumps(group).encode())

    def append(self, step: int, row_values: Mapping[str, Float[np.ndarray, "V"]]) -> None:
        """Add the record of a step; it is on disk after the next `flush`, or once a chunk is full."""
        self.pending.append((step, dict(row_values)))
        if (self.length + len(self.pending)) % STEPS_IN_CHUNK == 0:
            self.flush()

    def flush(self) -> None:
        """Write the pending records.

        Raises:
            OSError: the disk does not take them.
        """
        if not self.pending:
            return
        try:
            self._flush()
        except ValueError as error:  # so tensorstore tells of a full disk, or of a folder that went away
            reason = str(error).splitlines()[0][:200]
            raise refused(self.folder, error) or OSError(f"{self.folder} cannot be written ({reason})") from error

    def _flush(self) -> None:
        start, end = self.length, self.length + len(self.pending)
        writes = []
        for name, array in self.arrays.items():
            values = [step if name == "step" else record[name] for step, record in self.pending]
            array = array.resize(exclusive_max=[end] if name == "step" else [end, None]).result()
            self.arrays[name] = array
            block = np.asarray(values, array.dtype.numpy_dtype)
            self.crcs[name] = crc32c.crc32c(block.tobytes(), self.crcs[name])
            writes.append(array[start:end].write(block))
        for write in writes:
            write.result()
        if start % STEPS_IN_CHUNK == 0:
            sync_folders(self.folder)  # new ones: tensorstore waits for files, and for their names
        self.length, self.pending = end, []
        self._publish()
