"""The history of every row, as a zarr group that xarray opens."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import tensorstore as ts
from jaxtyping import Float, Num

from tied_lm.files import AGAIN, Damaged, checksum, refused, replace, sync_folders
from tied_lm.record import openblock
from tied_lm.record.openblock import OpenBlock, Pending

STEPS_IN_CHUNK = 32  # held in memory, and in the open block, until they are full
TOKENS_IN_CHUNK = 4096
CHUNKS_APART = 4  # of no more than so many each is a file
STRINGS = "strings"

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}

Read = Callable[[Any], np.ndarray]


def files_of(size: int) -> tuple[int, int]:
    """Files in which a block of so many tokens is, and chunks in each: of many tokens all are in one shard.

    A shard spans tokens only, so that records that are added rewrite none that is full.
    """
    chunks = -(-size // TOKENS_IN_CHUNK)
    return (1, chunks) if chunks > CHUNKS_APART else (chunks, 1)


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


def length_in(folder: Path) -> int:
    """Records in the chunks of a log, as the group's metadata tell."""
    path = folder / "zarr.json"
    if not path.exists():
        return 0
    group = json.loads(path.read_text(encoding="utf-8"))
    return int(group["consolidated_metadata"]["metadata"]["step"]["shape"][0])


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

    Records are written chunk by chunk; those that do not fill one yet are in the open block. The group's metadata,
    which hold the shapes, are replaced in one go, once the records are there, so that a reader never sees arrays of
    different lengths.
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
        block: bytes = b"",
    ):
        """Create the group, or open it. Nothing of what is there is changed before `cut`.

        Args:
            fields: attributes by the name of the field.
            constants: values of each row that do not change.
            first_step: of what will be written.
            token_strings: an attribute of `token`, since zarr has no strings that every reader knows.
            dimension: what a record has a value for each of.
            length: records in chunks; by default those that the group tells of.
            block: what the open block holds after them.

        Raises:
            Damaged: it cannot be read.
        """
        if not first_step and folder.exists():
            for left in openblock.others(folder):
                left.unlink()
            shutil.rmtree(folder)
        self.folder, self.dimension = folder, dimension
        with readable(folder):
            self._open_all(fields, constants, token_strings)
            length = length_in(folder) if length is None else length
            self._count(first_step, length, openblock.records_in(block, self.kind))

    def _open_all(
        self,
        fields: Mapping[str, dict[str, Any]],
        constants: Mapping[str, Num[np.ndarray, "V"]],
        token_strings: Sequence[str],
    ) -> None:
        folder = self.folder
        for left in folder.rglob("*.__lock"):  # by a kill; tensorstore would write over its start only
            left.unlink()
        (vocab_size,) = {values.size for values in constants.values()}
        self.kind = openblock.kind_of(fields, vocab_size)
        opened = {
            name: self._open(name, ("step", self.dimension), (0, vocab_size), "float32", attributes)
            for name, attributes in fields.items()
        }
        opened["step"] = self._open("step", ("step",), (0,), "int64", {"units": "updates"})
        if not (folder / "zarr.json").exists():
            writes = []
            for name, values in {self.dimension: np.arange(vocab_size), **constants}.items():
                kind = "int64" if values.dtype.kind == "i" else "float64"
                attributes = {STRINGS: list(token_strings)} if name == self.dimension and token_strings else {}
                array = self._open(name, (self.dimension,), values.shape, kind, attributes).result()
                writes.append(array.write(values.astype(kind)))
            _finish(writes)
        self.arrays = dict(zip(opened, _finish(opened.values()), strict=True))
        self.metadata = metadata_in(folder)
        sync_folders(folder)

    def _count(self, first_step: int, length: int, block: np.ndarray) -> None:
        """Find what is kept of the records in chunks and of those in the open block."""
        steps = np.asarray(self.arrays["step"][:length].read().result())
        self.length = int(np.searchsorted(steps, first_step))
        kept = block[block["step"] < first_step] if self.length == length else block[:0]
        fields = self.arrays.keys() - {"step"}
        self.pending: list[Pending] = [(int(one["step"]), {name: one[name] for name in fields}) for one in kept]
        self.block = OpenBlock(openblock.path_of(self.folder, self.length), self.kind, len(kept))
        self.crcs = {
            name: crc_of(array, self.length, lambda part: part.read().result()) for name, array in self.arrays.items()
        }
        for name in self.metadata.keys() - self.arrays.keys():
            self.crcs[name] = crc_of(self._constant(name), None, lambda part: part.read().result())

    def _constant(self, name: str) -> Any:
        """An array that is there."""
        return self._open(name, (self.dimension,), (0,), "", {}).result()

    def entry(self) -> dict[str, Any]:
        """What the manifest holds of its chunks: how many records, and checksums of the values and of the metadata."""
        return {
            "length": self.length,
            "metadata": checksum(_fixed(self.metadata)),
            "arrays": dict(self.crcs),
        }

    @property
    def kept_steps(self) -> list[int]:
        """The steps that are written."""
        in_chunks = np.asarray(self.arrays["step"][: self.length].read().result()).tolist()
        return in_chunks + [step for step, _ in self.pending[: self.block.count]]

    def _open(
        self, name: str, dimensions: tuple[str, ...], shape: tuple[int, ...], kind: str, attributes: dict[str, Any]
    ) -> Any:
        """The future of an array, which is made if it is not there."""
        chunk = [{"step": STEPS_IN_CHUNK, self.dimension: min(shape[-1], TOKENS_IN_CHUNK)}[d] for d in dimensions]
        codecs: list[dict[str, Any]] = [
            LITTLE_ENDIAN,
            {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
        ]
        chunks = files_of(shape[-1])[1]
        file = [*chunk[:-1], chunk[-1] * chunks]
        if chunks > 1:
            index = [LITTLE_ENDIAN, {"name": "crc32c"}]
            shards = {"chunk_shape": chunk, "codecs": codecs, "index_codecs": index, "index_location": "end"}
            codecs = [{"name": "sharding_indexed", "configuration": shards}]
        metadata = {
            "data_type": kind,
            "shape": shape,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": file}},
            "codecs": codecs,
            "dimension_names": dimensions,
            "attributes": attributes,
        }
        store = {"driver": "file", "path": str(self.folder.absolute() / name)}
        path = self.folder / name / "zarr.json"
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": store, "store_data_equal_to_fill_value": True}
        return ts.open(spec if path.exists() else spec | {"metadata": metadata}, open=True, create=not path.exists())

    def held(self) -> dict[Path, bytes]:
        """What is kept of the open block, by its file."""
        kept = self.pending[: self.block.count]
        return {path: openblock.encoded(kept, self.kind) for path in self.block.files}

    def cut(self) -> None:
        """Cut off everything from the first step on, once nothing vouches for it any more.

        No chunk is removed, so that who opened the log before reads no zeros; its place is written over later. A reader
        must not see records go, so the group is published first.
        """
        self._publish()
        self._resize(self.length)
        self.tidy()
        if self.block.count:
            os.truncate(self.block.path, self.block.count * self.kind.itemsize)
        else:
            self.block.path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove the files of the blocks that are chunks by now, once nothing vouches for them any more."""
        for path in openblock.others(self.folder, self.block.path):
            path.unlink()

    def _publish(self) -> None:
        for name in self.arrays:
            self.metadata[name]["shape"][0] = self.length
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": self.metadata},
        }
        replace(self.folder / "zarr.json", json.dumps(group).encode())

    def _resize(self, length: int) -> None:
        """Give every array room for so many records, those of the steps last; no chunk is removed."""
        for names in (self.arrays.keys() - {"step"}, {"step"}):
            changed = [name for name in names if self.arrays[name].shape[0] != length]
            self.arrays.update(zip(changed, _finish([_resized(self.arrays[n], length) for n in changed]), strict=True))

    def append(self, step: int, row_values: Mapping[str, Float[np.ndarray, "V"]]) -> None:
        """Add the record of a step; it is on disk after the next `hold`, or in a chunk once that is full."""
        self.pending.append((step, dict(row_values)))
        if (self.length + len(self.pending)) % STEPS_IN_CHUNK == 0:
            self.flush()

    def hold(self) -> None:
        """Write the pending records into the open block."""
        self.block.add(self.pending[self.block.count :])

    def flush(self) -> None:
        """Write the pending records into a chunk, though it may not be full.

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
        # A chunk that is new is written whole, since in its place there may be one that was cut off.
        is_new = start % STEPS_IN_CHUNK == 0
        room = start + STEPS_IN_CHUNK if is_new else end
        self._resize(room)
        writes = []
        for name, array in self.arrays.items():
            values = [step if name == "step" else record[name] for step, record in self.pending]
            block = np.asarray(values, array.dtype.numpy_dtype)
            self.crcs[name] = crc32c.crc32c(block.tobytes(), self.crcs[name])
            empty = [(0, room - end)] + [(0, 0)] * (block.ndim - 1)
            writes.append(array[start:room].write(np.pad(block, empty)))
        _finish(writes)
        self._resize(end)
        if is_new:
            sync_folders(self.folder)  # tensorstore waits for files, and for their names
        self.length, self.pending = end, []
        self.block = OpenBlock(openblock.path_of(self.folder, end), self.kind)
        self._publish()


def _resized(array: Any, length: int) -> Any:
    """The future of an array with room for so many records."""
    return array.resize(exclusive_max=[length] + [None] * (array.ndim - 1), resize_metadata_only=True)


def _finish(futures: Collection[Any]) -> list[Any]:
    """What tensorstore's futures give. All are begun before one is waited for, since the disk serves many at once."""
    for future in futures:
        getattr(future, "commit", future).force()  # of a write it is the commit that waits for being asked for
    return [future.result() for future in futures]
