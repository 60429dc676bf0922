"""Documents: which files there are, and which of them are held out."""

import dataclasses
import hashlib
import io
import os
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from tied_lm.checks import ConfigError
from tied_lm.config import Data
from tied_lm.data import idsfile
from tied_lm.data.paths import find

FIELD = "data.paths"
HELDOUT_FIELD = "data.heldout_paths"
BLOCK = 2**20  # bytes read at once
SLACK = 0.1  # of the smaller part, by which files or lines that stay whole may miss its size


@dataclasses.dataclass(frozen=True)
class Document:
    """A range of bytes in a file, or in memory where the text has no file of its own."""

    name: str
    place: Path | bytes
    start: int
    stop: int
    dtype: np.dtype  # of its items: bytes for text, else ids
    sha256: str  # of the whole file
    field: str = FIELD  # of the config, which names the file
    header: int = 0  # bytes of the file before its first item

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    @property
    def count(self) -> int:
        """Items."""
        return self.size // self.dtype.itemsize

    @property
    def offset(self) -> int:
        """Items of the file before this one's first."""
        return (self.start - self.header) // self.dtype.itemsize

    @property
    def identity(self) -> str:
        """What its content depends on."""
        return f"{self.sha256}:{self.start}:{self.stop}:{self.dtype.str}"

    def open(self) -> io.BufferedIOBase:
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

    def ids(self) -> Iterator[Integer[np.ndarray, "N"]]:
        """Its items chunk by chunk; they are read, not mapped, so that memory stays small."""
        with self.open() as file:
            file.seek(self.start)
            for start in range(self.start, self.stop, BLOCK):
                yield np.frombuffer(file.read(min(BLOCK, self.stop - start)), self.dtype)

    def mapped(self) -> Integer[np.ndarray, "N"]:
        """Its items, of which those that are used are read from the disk."""
        if isinstance(self.place, bytes):
            return np.frombuffer(self.place[self.start : self.stop], self.dtype)
        # An empty file cannot be mapped.
        return (
            np.memmap(self.place, self.dtype, "r", self.start, (self.count,)) if self.count else np.zeros(0, self.dtype)
        )


@dataclasses.dataclass(frozen=True)
class Split:
    """The training and the held-out documents, each in a fixed order. One that is cut is in both."""

    train: list[Document]
    heldout: list[Document]
    files: int
    duplicates: int  # files with the content of another, which were dropped
    left_out: Mapping[str, Collection[str]]  # files by the reason

    @property
    def parts(self) -> tuple[list[Document], list[Document]]:
        return self.train, self.heldout


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
            return Document(
                name, path, start, size, dtype, hashlib.file_digest(file, "sha256").hexdigest(), field, start
            )
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


def _named_documents(field: str, paths: tuple[str, ...], data: Data, left_out: dict[str, set[str]]) -> list[Document]:
    """The files that the paths name. Binary ones, of which a folder or a glob may hold some, are no text."""
    found = find(field, paths)
    documents = []
    for file, by_itself in found.files.items():
        if data.tokenizer != "ids" and not by_itself and _is_binary(field, Path(file)):
            found.left_out["binary"].add(file)
        else:
            documents.append(_read(field, file, Path(file), data))
    documents = [document for document in documents if document.size]
    if not documents:
        told = counted(found.left_out)
        raise ConfigError(field, paths, "at least one file that is not empty" + (f"; left out: {told}" if told else ""))
    for reason, files in found.left_out.items():
        left_out.setdefault(reason, set()).update(files)
    return documents


def _is_binary(field: str, path: Path) -> bool:
    """By the rule of Git: a zero among the first bytes. Files of ids are binary, too."""
    try:
        with path.open("rb") as file:
            return path.suffix in idsfile.SUFFIXES or b"\0" in file.read(8000)
    except OSError as error:
        raise ConfigError(field, str(path), f"files that can be read ({error.strerror})") from None


def counted(left_out: Mapping[str, Collection[str]]) -> str:
    """What was left out, in words."""
    return ", ".join(f"{len(files):,} {reason}" for reason, files in left_out.items())


@dataclasses.dataclass(frozen=True)
class Account:
    """How a text was split."""

    files: int
    tokens_train: int
    tokens_heldout: int
    share_heldout: float  # of all tokens
    share_unknown: tuple[float, ...] | None  # of the training and of the held-out tokens, if there can be any
    rows: int
    rows_never_seen: int  # in training
    duplicates_dropped: int
    left_out: dict[str, int]  # files by reason


def told(account: Account) -> str:
    """How a text was split, in one line."""
    parts = [
        f"{account.files:,} files" if account.files != 1 else "1 file",
        f"{account.tokens_train:,} tokens trained on",
        f"{account.tokens_heldout:,} held out ({account.share_heldout:.2%})",
    ]
    if account.share_unknown is not None:
        parts.append("of them {:.2%} and {:.2%} <unk>".format(*account.share_unknown))
    parts.append(f"{account.rows_never_seen:,} of {account.rows:,} rows never seen")
    parts.append(f"{account.duplicates_dropped:,} duplicates dropped")
    if account.left_out:
        parts.append("left out: " + " and ".join(f"{n:,} {reason}" for reason, n in account.left_out.items()))
    return "text: " + ", ".join(parts)


def _nearest(text: bytes, position: int, sign: bytes) -> int | None:
    """Where `sign` begins that is nearest to a position."""
    before, after = text.rfind(sign, 0, position + 1), text.find(sign, position)
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - position), default=None)


def _cut(document: Document, heldout: float, slack: float, kind: str) -> int:
    """The byte of a document behind which about so many items are held out.

    It is the line end nearest to there, if it is off by at most `slack`; else the space; else where a token ends. Each
    side has an item.
    """
    cut = document.start + (document.count - min(max(1, round(heldout)), document.count - 1)) * document.dtype.itemsize
    if kind == "ids":
        return cut
    reach = int(min(slack, BLOCK))
    low, high = max(document.start + 1, cut - reach), min(document.stop - 1, cut + reach)
    low -= min(3, low - document.start)  # a character of UTF-8 may begin before
    with document.open() as file:
        file.seek(low)
        text = file.read(high + 1 - low)
    wanted = cut - low

    def allowed(place: int) -> bool:
        return abs(place - wanted) <= reach and document.start < low + place < document.stop

    # The cut is behind a line end.
    line = _nearest(text, max(0, wanted - 1), b"\n")
    if line is not None and allowed(line + 1):
        return low + line + 1
    if kind == "bytes":
        return cut
    space = _nearest(text, wanted, b" ")
    if space is not None and allowed(space):
        return low + space
    back = 0
    while back < min(3, wanted, cut - document.start - 1) and text[wanted - back] & 0xC0 == 0x80:
        back += 1
    return cut - back


def _drawn(documents: list[Document], data: Data) -> tuple[list[Document], list[Document]]:
    """The documents in two parts, of which the second has the fraction of the items that is to be held out.

    Files are drawn by `data.seed`, and held out as long as they fit; of the first that does not the end is.
    """
    total = sum(document.count for document in documents)
    target = data.heldout_fraction * total
    slack = SLACK * min(target, total - target)
    train, heldout, held = dict(enumerate(documents)), dict[int, Document](), 0
    for i in np.random.default_rng(data.seed).permutation(len(documents)).tolist():
        document = documents[i]
        fits = held + document.count <= target + slack
        if held >= target - slack and not (fits and abs(held + document.count - target) < abs(held - target)):
            break
        if not fits and document.count > 1:
            cut = _cut(document, target - held, slack, data.tokenizer)
            train[i] = dataclasses.replace(document, stop=cut)
            heldout[i] = dataclasses.replace(document, start=cut)
        elif fits or (not heldout and len(train) > 1):
            heldout[i] = train.pop(i)
        held += document.count
    # In their own order, so that a file's neighbours stay its neighbours.
    return list(train.values()), [heldout[i] for i in sorted(heldout)]


def _unique(documents: list[Document]) -> dict[str, Document]:
    """The first document of each content."""
    unique: dict[str, Document] = {}
    for document in documents:
        unique.setdefault(document.sha256, document)
    return unique


def read_split(data: Data) -> Split:
    """The documents that a config names; a document with the content of another is dropped.

    Held out are the files that `data.heldout_paths` names, which are then not trained on. Without them
    `data.heldout_fraction` of the bytes is held out, to within a tenth of itself wherever the text can be cut so
    finely: files that `data.seed` draws, and the end of one more, cut behind a line end; where none is near, at a
    token.

    Raises:
        ConfigError: the paths name nothing that can be read.
    """
    left_out: dict[str, set[str]] = {}
    named = _named_documents(FIELD, data.paths, data, left_out) if data.paths else _python_documents(data)
    unique = _unique(named)
    if not data.heldout_paths:
        documents = list(unique.values())
        return Split(*_drawn(documents, data), len(documents), len(named) - len(documents), left_out)
    apart = _named_documents(HELDOUT_FIELD, data.heldout_paths, data, left_out)
    heldout = _unique(apart)
    files = len(unique | heldout)
    train = [document for sha256, document in unique.items() if sha256 not in heldout]
    if not train:
        raise ConfigError(HELDOUT_FIELD, data.heldout_paths, f"other texts than those of {FIELD}")
    duplicates = len(named) - len(unique) + len(apart) - len(heldout)
    return Split(train, list(heldout.values()), files, duplicates, left_out)
