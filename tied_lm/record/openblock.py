"""The open block of a log: the records after those in chunks, in a file beside the log that only grows.

So a chunk is written once, when its block is full or the log is closed. The file is named after the number of records
before it, and each record in it is the step and then the fields in the order of their names.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

Pending = tuple[int, Mapping[str, Float[np.ndarray, "V"]]]  # a step and what was recorded there


def kind_of(fields: Iterable[str], size: int) -> np.dtype:
    """The type of a record with `size` values in each field."""
    return np.dtype([("step", "<i8"), *((name, "<f4", (size,)) for name in sorted(fields))])


def records_in(data: bytes, kind: np.dtype) -> np.ndarray:
    """The whole records (T) in a file."""
    return np.frombuffer(data, kind, len(data) // kind.itemsize)


def encoded(records: Sequence[Pending], kind: np.dtype) -> bytes:
    """Records as the file holds them."""
    found: Any = np.zeros(len(records), kind)
    for one, (step, values) in zip(found, records, strict=True):
        one["step"] = step
        for name in (kind.names or ())[1:]:
            one[name] = values[name]
    return bytes(found.tobytes())


def path_of(log: Path, before: int) -> Path:
    """The file of the block with so many records before it."""
    return log.with_name(f"{log.stem}.open.{before}")


def others(log: Path, keep: Path | None = None) -> list[Path]:
    """The files of a log's blocks, but for one."""
    return [path for path in log.parent.glob(path_of(log, 0).stem + ".*") if path != keep]


class OpenBlock:
    """Writes the file of one block, which is there as soon as it holds something."""

    def __init__(self, path: Path, kind: np.dtype, count: int = 0):
        """
        Args:
            count: records in it that are kept.
        """
        self.path, self.kind, self.count = path, kind, count

    @property
    def files(self) -> list[Path]:
        """The file, if there is one."""
        return [self.path] if self.count else []

    def add(self, records: Sequence[Pending]) -> None:
        """Write records after those that are there."""
        if records:
            with self.path.open("ab") as file:
                file.write(encoded(records, self.kind))
            self.count += len(records)
