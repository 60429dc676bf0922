"""What is the same in the logs of several runs takes its space once: one file under the names of all (hard links).

These are the arrays that no step changes (numbers and texts of the tokens, frequencies, bands), whose files are never
written into: a log that is made anew has new ones. So each log still has all of its own, wherever its folder goes.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from tied_lm.files import sync
from tied_lm.record.history import metadata_in, readable


def share(runs: Iterable[Path]) -> None:
    """Put files of equal bytes of the constant arrays of some runs together. None does so while they are written.

    Raises:
        Damaged: a log cannot be read.
    """
    first: dict[bytes, Path] = {}
    for log in (log for run in runs for log in sorted(run.glob("*.zarr"))):
        with readable(log):
            arrays = [name for name, array in metadata_in(log).items() if array["dimension_names"][0] != "step"]
        for path in sorted(path for name in arrays for path in (log / name).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.suffix != ".new":
                other = first.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
                if not path.samefile(other):
                    _replace_by_link(path, other)


def _replace_by_link(path: Path, other: Path) -> None:
    """Make a file another name of one that holds the same bytes; where there are no links, it stays as it is."""
    new = path.with_name(path.name + ".new")
    with contextlib.suppress(OSError):
        new.unlink(missing_ok=True)
        os.link(other, new)
        if new.read_bytes() == path.read_bytes():
            os.replace(new, path)
            sync(path.parent)
        new.unlink(missing_ok=True)
