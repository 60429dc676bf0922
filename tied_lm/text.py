"""Documents: which files there are, and which of them are held out."""

import dataclasses
import glob
import hashlib
import io
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int

from tied_lm import idsfile
from tied_lm.config import ConfigError, Data

FIELD = "data.paths"
HELDOUT_FIELD = "data.heldout_paths"
BLOCK = 2**20  # bytes read at once


@dataclasses.dataclass(frozen=True)
class Document:
    """A range of bytes in a file, or in memory where the text has no file of its own."""

    name: str
    place: Path | bytes
    start: int
    stop: int
    dtype: np.dtype  # of its items: bytes for text, else ids
    sha256: str  # of the whole file

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    @property
    def identity(self) -> str:
        """What its content depends on."""
        return f"{self.sha256}:{self.start}:{self.stop}:{self.dtype.str}"

    def open(self) -> BinaryIO:
        return io.BytesIO(self.place) if isinstance(self.place, bytes) else self.place.open("rb")

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[int, bytes]]:
        """The text block by block, each with its offset; see `break_of` for where they end.

        Raises:
            OSError: the file has become shorter.
        """
        with self.open() as file:
            file.seek(self.start)
            position, rest = self.start, b""
            while position + len(rest) < self.stop:
                new = file.read(min(size, self.stop - position - len(rest)))
                if not new:
                    raise OSError(f"{self.name} has become shorter while it was read")
                text = rest + new
                end = break_of(text) if position + len(text) < self.stop else len(text)
                yield position, text[:end]
                position, rest = position + end, text[end:]

    def ids(self) -> Iterator[Int[np.ndarray, "N"]]:
        """Its items chunk by chunk; they are read, not mapped, so that memory stays small."""
        with self.open() as file:
            file.seek(self.start)
            for start in range(self.start, self.stop, BLOCK):
                yield np.frombuffer(file.read(min(BLOCK, self.stop - start)), self.dtype)

    def mapped(self) -> Int[np.ndarray, "N"]:
        """Its items, of which those that are used are read from the disk."""
        count = self.size // self.dtype.itemsize
        if isinstance(self.place, bytes):
            return np.frombuffer(self.place[self.start : self.stop], self.dtype)
        # An empty file cannot be mapped.
        return np.memmap(self.place, self.dtype, "r", self.start, (count,)) if count else np.zeros(0, self.dtype)


class Split(NamedTuple):
    """The training and the held-out documents, each in a fixed order."""

    train: list[Document]
    heldout: list[Document]


def break_of(text: bytes) -> int:
    """Where to break a text: behind its last line end; else before its last space; else before its last character."""
    line = text.rfind(b"\n") + 1
    space = text.rfind(b" ")
    if line or space > 0:
        return line or space
    end = len(text) - 1
    while end > max(0, len(text) - 4) and text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
        end -= 1
    return max(end, 1)


def _read(field: str, name: str, path: Path, data: Data) -> Document:
    """A file as a document. Hashing reads all of it once, in chunks."""
    ids = data.tokenizer == "ids"
    if not ids and path.suffix in idsfile.SUFFIXES:
        raise ConfigError(field, name, f"text; {' and '.join(idsfile.SUFFIXES)} files need data.tokenizer = 'ids'")
    try:
        size = path.stat().st_size
        dtype, start = np.dtype(np.uint8), 0
        if ids and size:
            dtype, start = idsfile.layout(field, path, size, data.bin_dtype, data.vocab_size)
        with path.open("rb") as file:
            return Document(name, path, start, size, dtype, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise ConfigError(field, name, f"files that can be read ({error.strerror})") from None


def _python_documents(data: Data) -> list[Document]:
    """The help topics and the standard library's sources, without tests and installed packages."""
    from pydoc_data.topics import topics

    if data.tokenizer == "ids":
        raise ConfigError(FIELD, data.paths, "files of ids; the text that ships with Python is none")
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
    documents = []
    for name, text in topics.items():
        raw = text.encode()
        digest = hashlib.sha256(raw).hexdigest()
        documents.append(Document(f"topic/{name}", raw, 0, len(raw), np.dtype(np.uint8), digest))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder) / name
                documents.append(_read(FIELD, path.relative_to(root).as_posix(), path, data))
    return [document for document in documents if document.size]


def _named_documents(field: str, paths: tuple[str, ...], data: Data) -> list[Document]:
    """The files that the paths name: a file, every file below a folder, or those that match a glob."""
    found: dict[str, Document] = {}
    for path in paths:
        expanded = os.path.expanduser(path)
        matches = [expanded] if os.path.lexists(expanded) else sorted(glob.glob(expanded, recursive=True))
        if not matches:
            raise ConfigError(field, path, "existing files or folders, or globs that match some")
        for match in matches:
            below = sorted(p for p in Path(match).rglob("*") if p.is_file()) if os.path.isdir(match) else [Path(match)]
            found |= {str(file): _read(field, str(file), file, data) for file in below if str(file) not in found}
    documents = [document for document in found.values() if document.size]
    if not documents:
        raise ConfigError(field, paths, "at least one file that is not empty")
    return documents


def _cut(document: Document, fraction: float, whole_lines: bool) -> Split:
    """One document cut in two; its end is held out."""
    items = document.size // document.dtype.itemsize
    cut = document.start + (items - max(1, round(fraction * items))) * document.dtype.itemsize
    if whole_lines and document.start < cut:
        low = max(document.start, cut - BLOCK)
        with document.open() as file:
            file.seek(low)
            cut = low + break_of(file.read(cut - low))
    return Split([dataclasses.replace(document, stop=cut)], [dataclasses.replace(document, start=cut)])


def read_split(data: Data) -> Split:
    """The documents that a config names; a document with the content of another is dropped.

    Held out are the files that `data.heldout_paths` names, which are then not trained on. Without them the held-out
    files are drawn by `data.seed` until they hold `data.heldout_fraction` of the bytes; at least one file stays on
    each side. One document alone is cut, and its end is held out: at a byte if bytes are the tokens, else behind a
    line.

    Raises:
        ConfigError: the paths name nothing that can be read.
    """
    named = _named_documents(FIELD, data.paths, data) if data.paths else _python_documents(data)
    unique = {document.sha256: document for document in reversed(named)}
    documents = [unique[sha256] for sha256 in dict.fromkeys(document.sha256 for document in named)]
    if data.heldout_paths:
        heldout = {document.sha256: document for document in _named_documents(HELDOUT_FIELD, data.heldout_paths, data)}
        train = [document for document in documents if document.sha256 not in heldout]
        if not train:
            raise ConfigError(HELDOUT_FIELD, data.heldout_paths, f"other texts than those of {FIELD}")
        return Split(train, list(heldout.values()))
    if len(documents) == 1:
        return _cut(documents[0], data.heldout_fraction, data.tokenizer in ("words", "bpe"))
    order = np.random.default_rng(data.seed).permutation(len(documents))
    sizes = np.cumsum([documents[i].size for i in order])
    n = min(1 + int(np.searchsorted(sizes, data.heldout_fraction * sizes[-1])), len(documents) - 1)
    # In their own order, so that a file's neighbours stay its neighbours.
    return Split([documents[i] for i in sorted(order[n:])], [documents[i] for i in sorted(order[:n])])
