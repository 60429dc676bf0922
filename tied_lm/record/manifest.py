"""What a run's logs are known to hold: length and checksum of each, replaced whenever they are flushed.

What is written after that lies past the lengths, so a reader of a run that goes on checks the part before. Before
a log is cut the manifest is replaced by one that vouches for what will be left. A folder without one is of an older
version: it is read as it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crc32c

from tied_lm.files import AGAIN, Damaged, check_shape, read_json, sync, sync_all, write_json
from tied_lm.record import openblock
from tied_lm.record.history import length_in, readable, verify

MANIFEST = "manifest.json"
UNCHECKED = "remove that file to read the logs unchecked"
EVENTS = "events.out.tfevents."


def read(folder: Path) -> dict[str, Any]:
    """The entries by the name of the log; none where there is no manifest.

    Raises:
        Damaged: it is not what was written.
    """
    try:
        entries = read_json(folder / MANIFEST, UNCHECKED)
    except FileNotFoundError:
        return {}
    check_shape(folder / MANIFEST, UNCHECKED, entries, {name: {"length": int} for name in entries})
    return entries


def vouched(folder: Path, name: str, entry: Mapping[str, int]) -> bytes:
    """The part of a file that the manifest vouches for.

    Raises:
        Damaged: it is missing, too short, or other bytes.
    """
    path = folder / name
    data = path.read_bytes()[: entry["length"]] if path.exists() else b""
    if len(data) != entry["length"] or crc32c.crc32c(data) != entry["crc32c"]:
        without = f"remove it and {MANIFEST} to continue without its curves"
        raise Damaged(
            f"{path} is damaged (its length or checksum differs); {without if name.startswith(EVENTS) else AGAIN}"
        )
    return data


def open_block(folder: Path, name: str, entries: Mapping[str, Any], length: int) -> bytes:
    """What the open block of a log holds after `length` records in chunks; none if there is no such block.

    Raises:
        Damaged: it is not what was written.
    """
    path = openblock.path_of(folder / name, length)
    if name not in entries:
        return path.read_bytes() if path.exists() else b""
    return vouched(folder, path.name, entries[path.name]) if path.name in entries else b""


class Manifest:
    """Keeps the manifest of a folder whose logs are being written."""

    def __init__(self, folder: Path, first_step: int):
        """Check what the logs hold.

        Args:
            first_step: of what will be written; 0 if all is to be written anew, and then nothing is checked, and
                nothing is vouched for any more.

        Raises:
            Damaged: a file is not what was written.
        """
        self.folder, self.first_step, self.files = folder, first_step, dict[str, tuple[int, int]]()
        self.found = read(folder) if first_step else {}
        for name, entry in self.found.items():
            if "arrays" in entry:
                verify(folder / name, entry)
            else:
                vouched(folder, name, entry)
        if not first_step:
            (folder / MANIFEST).unlink(missing_ok=True)
            if folder.exists():
                sync(folder)

    def kept(self, name: str) -> tuple[int, bytes]:
        """Records in the chunks of a log that was found, and what its open block holds after them.

        Raises:
            Damaged: it cannot be read.
        """
        if not self.first_step:
            return 0, b""
        with readable(self.folder / name):
            length = self.found[name]["length"] if name in self.found else length_in(self.folder / name)
        return length, open_block(self.folder, name, self.found, length)

    def replace(self, files: Mapping[Path, bytes], arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """Vouch for what will be left of the logs once they are cut.

        Args:
            files: what they will hold, which is what they begin with.
            arrays: see `publish`.
        """
        if self.first_step:
            starts = {path.name: _entry(len(data), crc32c.crc32c(data)) for path, data in files.items()}
            write_json(self.folder / MANIFEST, starts | dict(arrays))

    def publish(self, files: list[Path], arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """Wait until all is on the disk, and vouch for it.

        Args:
            files: that only grow; what they hold now.
            arrays: entries of zarr groups, by name.
        """
        entries, grown = dict[str, Any](), [self.folder]
        for path in files:
            name = path.relative_to(self.folder).as_posix()
            length, crc = self.files.get(name, (0, 0))
            with path.open("rb") as file:
                file.seek(length)
                data = file.read()
            if data:
                grown.append(path)
            self.files[name] = length + len(data), crc32c.crc32c(data, crc)
            entries[name] = _entry(*self.files[name])
        sync_all(grown)
        write_json(self.folder / MANIFEST, entries | dict(arrays))


def _entry(length: int, crc: int) -> dict[str, int]:
    return {"length": length, "crc32c": crc}
