"""Files that are whole after a crash, and JSON that tells when it was changed."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crc32c

AGAIN = "remove that run's folder to train it again"
ANY: Mapping[str, Any] = {}  # shape of JSON
AT_ONCE = 16  # waits for the disk, which serves many about as fast as one
SEAL = "crc32c"  # the last key of a JSON file: the checksum of the others, as they are dumped without spaces


class Damaged(RuntimeError):
    """A file that cannot be trusted; the message names it and says what can be done."""


def refused(place: Path, error: Exception) -> OSError | None:
    """The system's own error of a write that it refused, of which tensorstore tells among much else; else None."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found is None or int(found[1]) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
        return None
    return OSError(int(found[1]), os.strerror(int(found[1])), str(place))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Sequence[Path]) -> None:
    """Wait until files, and the names in folders, are on the disk."""
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(sync, paths))
    except RuntimeError:  # as the interpreter ends it starts no threads any more
        for path in paths:
            sync(path)


def sync_folders(place: Path) -> None:
    """Wait until all names in and below a folder are on the disk."""
    sync_all([Path(folder) for folder, _, _ in os.walk(place)])


def replace(path: Path, data: bytes) -> None:
    """Replace a file in one go: no reader meets half of it, and after a crash it is the old one or the new one."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync(path.parent)


def checksum(values: Mapping[str, Any]) -> int:
    """CRC-32C of nested values as JSON."""
    return int(crc32c.crc32c(json.dumps(values, separators=(",", ":")).encode()))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file of nested values, sealed with their checksum."""
    plain = json.loads(json.dumps(values, allow_nan=False))
    replace(path, (json.dumps(plain | {SEAL: checksum(plain)}, indent=2) + "\n").encode())


def read_json(path: Path, remedy: str, shape: Mapping[str, Any] = ANY) -> dict[str, Any]:
    """What `write_json` wrote; files of before there were checksums are taken as they are.

    Args:
        remedy: what can be done where it is damaged.
        shape: of what has to be there: the type of a field, or the shape of a group of fields.

    Raises:
        Damaged: it is no JSON object, not the one that was written, or one of another shape.
        FileNotFoundError: there is none.
    """
    if path.exists() and not path.is_file():
        raise Damaged(f"{path} is damaged (it is no file); {remedy}")  # a FIFO would be waited for
    try:
        values = json.loads(path.read_bytes().decode())
        seal = values.pop(SEAL, None)
    except (ValueError, AttributeError, RecursionError, TypeError):
        raise Damaged(f"{path} is damaged (it is no JSON object); {remedy}") from None
    if seal is not None and seal != checksum(values):
        raise Damaged(f"{path} is damaged (its checksum differs); {remedy}")
    check_shape(path, remedy, values, shape)
    return dict(values)


def check_shape(path: Path, remedy: str, values: Any, shape: Mapping[str, Any]) -> None:
    """See that nested values have the shape of what `path` should hold, see `read_json`."""
    for name, kind in shape.items():
        found = values.get(name) if isinstance(values, Mapping) else None
        if isinstance(kind, Mapping):
            check_shape(path, remedy, found, kind)
        elif type(found) is not kind:
            raise Damaged(f"{path} is damaged (it has no {name} as it was written); {remedy}")
