"""What a run's logs are known to hold: length and checksum of each, replaced whenever they are flushed.

What is written after that lies past the lengths, so a reader of a run that goes on checks the part before. A folder
without a manifest is of an older version, or one whose logs are just being cut: it is read as it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crc32c

from tied_lm.files import AGAIN, Damaged, check_shape, read_json, sync, write_json
from tied_lm.record.history import verify

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


class Manifest:
    """Keeps the manifest of a folder whose logs are being written."""

    def __init__(self, folder: Path, first_step: int):
        """Check what the logs hold, and take the manifest away while they are cut.

        Args:
            first_step: of what will be written; 0 if all is to be written anew, and then nothing is checked.

        Raises:
            Damaged: a file is not what was written.
        """
        self.folder, self.files = folder, dict[str, tuple[int, int]]()
        self.found = read(folder) if first_step else {}
        for name, entry in self.found.items():
            if "arrays" in entry:
                verify(folder / name, entry)
            else:
                vouched(folder, name, entry)
        (folder / MANIFEST).unlink(missing_ok=True)
        if folder.exists():
            sync(folder)

    def length(self, name: str) -> int | None:
        """Records of a zarr group that was found; None if the manifest did not hold it."""
        return self.found[name]["length"] if name in self.found else None

    def publish(self, files: list[Path], arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """Wait until all is on the disk, and vouch for it.

        Args:
            files: that only grow; what they hold now.
            arrays: entries of zarr groups, by name.
        """
        entries: dict[str, Any] = {}
        for path in files:
            length, crc = self.files.get(path.name, (0, 0))
            with path.open("rb") as file:
                file.seek(length)
                data = file.read()
            sync(path)
            self.files[path.name] = length + len(data), crc32c.crc32c(data, crc)
            entries[path.name] = dict(zip(("length", "crc32c"), self.files[path.name], strict=True))
        sync(self.folder)
        write_json(self.folder / MANIFEST, entries | dict(arrays))
