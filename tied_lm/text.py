"""Documents of real text: which files there are, and which of them are held out."""

import glob
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tied_lm.config import ConfigError

FIELD = "data.paths"


class Split(NamedTuple):
    """Bytes of the training and of the held-out documents, each joined in a fixed order."""

    train: np.ndarray  # uint8
    heldout: np.ndarray  # uint8


def _python_documents() -> list[tuple[str, bytes]]:
    """The help topics and the standard library's sources, without tests and installed packages."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
    documents = [(f"topic/{name}", text.encode()) for name, text in topics.items()]
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder) / name
                documents.append((path.relative_to(root).as_posix(), path.read_bytes()))
    return [(name, text) for name, text in documents if text]


def _named_documents(paths: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """The files that the paths name: a file, every file below a folder, or those that match a glob."""
    found: dict[str, bytes] = {}
    for path in paths:
        expanded = os.path.expanduser(path)
        matches = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
        if not matches:
            raise ConfigError(FIELD, path, "existing files or folders, or globs that match some")
        for match in matches:
            below = sorted(p for p in Path(match).rglob("*") if p.is_file()) if os.path.isdir(match) else [Path(match)]
            for file in below:
                try:
                    found[str(file)] = file.read_bytes()
                except OSError as error:
                    raise ConfigError(FIELD, str(file), f"files that can be read ({error.strerror})") from None
    documents = [(name, text) for name, text in found.items() if text]
    if not documents:
        raise ConfigError(FIELD, paths, "at least one file that is not empty")
    return documents


def read_split(paths: tuple[str, ...], fraction: float, seed: int) -> Split:
    """The documents, split by file; one document alone is cut, and its end is held out.

    The held-out files are drawn by `seed` until they hold `fraction` of the bytes; at least one file stays on
    each side. A document with the content of another is dropped, so that no held-out text was trained on.
    """
    documents = _named_documents(paths) if paths else _python_documents()
    unique = list({hashlib.sha256(text).digest(): text for _, text in documents}.values())
    if len(unique) == 1:
        (text,) = unique
        cut = len(text) - max(1, round(fraction * len(text)))
        train, heldout = text[:cut], text[cut:]
    else:
        order = np.random.default_rng(seed).permutation(len(unique))
        sizes = np.cumsum([len(unique[i]) for i in order])
        n = min(1 + int(np.searchsorted(sizes, fraction * sizes[-1])), len(unique) - 1)
        # In their own order, so that a file's neighbours stay its neighbours.
        train = b"".join(unique[i] for i in sorted(order[n:]))
        heldout = b"".join(unique[i] for i in sorted(order[:n]))
    return Split(np.frombuffer(train, np.uint8), np.frombuffer(heldout, np.uint8))
