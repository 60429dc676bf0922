"""Token ids on the disk: made once for a text and kept in the user's cache folder, or files of ids as they are."""

import bisect
import hashlib
import itertools
import json
import mmap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Integer

from tied_lm.checks import ConfigError, choose
from tied_lm.config import Data
from tied_lm.data import cache
from tied_lm.data.documents import Account, Document, Split, read_split
from tied_lm.data.tokenizers import TOKENIZERS, Tokenizer

FORMAT = 3  # of what is kept; a higher one leaves older ones alone
MODEL, COUNTS, ENDS = "tokenizer", "counts.npy", "heldout_ends.npy"
PARTS = ("train", "heldout")
RELEASE_EVERY = 32  # windows
RESIDENT_BYTES = 2**28  # of a mapped file, which may stay in memory
MOST_MAPPED = 64  # files; each takes one of the process's open files


class Tokens:
    """Token ids in files, one behind the other as one sequence. Few of many files are mapped at a time."""

    def __init__(self, documents: Sequence[Document]):
        self.documents = [document for document in documents if document.count]
        self.ends = np.cumsum([document.count for document in self.documents], dtype=np.int64).tolist()
        self.mapped: dict[int, Integer[np.ndarray, "N"]] = {}  # the last one used is the last

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def _map(self, i: int) -> Integer[np.ndarray, "N"]:
        """The ids of a file."""
        found = self.mapped.pop(i, None)
        if found is None:
            found = self.documents[i].mapped()
            if len(self.mapped) >= MOST_MAPPED:
                self.mapped.pop(next(iter(self.mapped)))
        self.mapped[i] = found
        return found

    def read(self, start: int, count: int) -> Integer[np.ndarray, "count"]:
        """The ids from `start` on; behind the last one follows the first."""
        found: list[np.ndarray] = []
        while count:
            i = bisect.bisect_right(self.ends, start)
            first = start - self.ends[i] + self.documents[i].count
            found.append(np.array(self._map(i)[first : first + count]))  # a copy, which keeps no file mapped
            count -= found[-1].size
            start = (start + found[-1].size) % self.size
        return found[0] if len(found) == 1 else np.concatenate(found)

    def read_windows(self, starts_N: Int[np.ndarray, "N"], windows_NxW: Integer[np.ndarray, "N W"]) -> None:
        """Fill each row with the ids from its start on."""
        for n, (row, start) in enumerate(zip(windows_NxW, starts_N.tolist(), strict=True)):
            row[:] = self.read(start, row.size)
            # The system maps up to 2 MiB around each place that is read, and unmaps nothing by itself.
            if (n + 1) % RELEASE_EVERY == 0:
                for mapped in self.mapped.values():
                    base: Any = mapped.base
                    if mapped.nbytes > RESIDENT_BYTES and isinstance(base, mmap.mmap):
                        base.madvise(mmap.MADV_DONTNEED)


class Corpus(NamedTuple):
    """The tokens of a text, and what made them."""

    tokenizer: Tokenizer
    train: Tokens
    heldout: Tokens
    counts_V: Int[np.ndarray, "V"]  # in the training part
    heldout_ends: Int[np.ndarray, "F"]  # where each held-out file ends, in tokens
    content: dict[str, Any]  # what the config does not say of the text
    about: Account


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id."""
    return next(dtype for dtype in map(np.dtype, ("<u1", "<u2", "<u4")) if vocab_size - 1 <= np.iinfo(dtype).max)


def open_corpus(data: Data) -> Corpus:
    """The tokens that a config names.

    Raises:
        ConfigError: the text or its tokens cannot be had as the config wants them, or what was kept of them is damaged.
    """
    kind = choose(TOKENIZERS, "data.tokenizer", data.tokenizer)
    split = read_split(data)
    if data.tokenizer == "ids":
        return _in_place(kind(data.vocab_size), split)
    place = _place(split, data)
    cache.provide(place, lambda new: _write_tokens(new, kind, split, data))
    return _kept(place, kind, split, data)


def whole_vocabulary(data: Data) -> int:
    """The rows that a text has if `data.vocab_size`, which is 0, stands for all of them.

    Raises:
        ConfigError: see `open_corpus`; or there is no such number.
    """
    kind = choose(TOKENIZERS, "data.tokenizer", data.tokenizer)
    split = read_split(data)
    if data.tokenizer == "ids":
        return 1 + _largest_id(kind(0), split)[0]
    if data.tokenizer != "words":
        return kind.build(split.train, data).vocab_size
    place = _place(split, data)
    cache.provide(place, lambda new: _write_tokenizer(new, kind.build(split.train, data)))
    cache.check(place)
    return kind.load((place / MODEL).read_bytes(), 0).vocab_size


def _place(split: Split, data: Data) -> Path:
    """Where the tokens of a text are kept."""
    depends = {
        "format": FORMAT,
        "tokenizer": [data.tokenizer, data.vocab_size, data.min_count, version("sentencepiece")],
        "train": [document.identity for document in split.train],
        "heldout": [document.identity for document in split.heldout],
    }
    return cache.corpora() / hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]


def _content(split: Split, tokens: Sequence[Tokens]) -> dict[str, Any]:
    """Sizes and hashes of the two parts; a hash is that of the list of the files' own hashes and ranges."""
    return {
        f"text_{name}": {
            "bytes": sum(document.size for document in documents),
            "tokens": part.size,
            "sha256": hashlib.sha256("\n".join(document.identity for document in documents).encode()).hexdigest(),
        }
        for name, documents, part in zip(PARTS, split.parts, tokens, strict=True)
    }


def _about(split: Split, tokens: Sequence[Tokens], counts_2xV: Int[np.ndarray, "2 V"], unknown: int | None) -> Account:
    train, heldout = (part.size for part in tokens)
    shares = None
    if unknown is not None:
        shares = tuple(float(counts_V[unknown] / max(1, counts_V.sum())) for counts_V in counts_2xV)
    return Account(
        files=split.files,
        tokens_train=train,
        tokens_heldout=heldout,
        share_heldout=heldout / max(1, train + heldout),
        share_unknown=shares,
        rows=counts_2xV.shape[1],
        rows_never_seen=int((counts_2xV[0] == 0).sum()),
        duplicates_dropped=split.duplicates,
        left_out={reason: len(files) for reason, files in split.left_out.items()},
    )


def _largest_id(tokenizer: Tokenizer, split: Split) -> tuple[int, int, Document]:
    """The largest id, and where it first is: its number in the file, from 0, and the file. Each id is looked at.

    Raises:
        ConfigError: one is below 0.
    """
    largest: tuple[int, int, Document] | None = None
    for document in itertools.chain(*split.parts):
        before = document.offset
        for ids in tokenizer.encode_document(document):
            if ids.min() < 0:
                place = before + int(ids.argmin())
                allowed = f"ids of 0 or more; it holds {ids.min()} as number {place:,} (from 0)"
                raise ConfigError(document.field, document.name, allowed)
            if largest is None or ids.max() > largest[0]:
                largest = int(ids.max()), before + int(ids.argmax()), document
            before += ids.size
    assert largest is not None  # no document is empty
    return largest


def _in_place(tokenizer: Tokenizer, split: Split) -> Corpus:
    """Files of ids, as they are; each id is looked at once."""
    high, place, document = _largest_id(tokenizer, split)
    if high >= tokenizer.vocab_size:
        allowed = f"above {high:,}, which is id number {place:,} (from 0) in {document.name}"
        raise ConfigError("data.vocab_size", tokenizer.vocab_size, allowed)
    counts_2xV = np.zeros((2, tokenizer.vocab_size), np.int64)
    for counts_V, documents in zip(counts_2xV, split.parts, strict=True):
        for ids in itertools.chain(*map(tokenizer.encode_document, documents)):
            counts_V += np.bincount(ids.astype(np.int64), minlength=tokenizer.vocab_size)
    tokens = [Tokens(documents) for documents in split.parts]
    about = _about(split, tokens, counts_2xV, tokenizer.unknown)
    ends, content = np.array(tokens[1].ends), _content(split, tokens)
    return Corpus(tokenizer, tokens[0], tokens[1], counts_2xV[0], ends, content, about)


def _write_tokenizer(new: Path, tokenizer: Tokenizer) -> None:
    (new / MODEL).write_bytes(tokenizer.model)


def _write_tokens(new: Path, kind: type[Tokenizer], split: Split, data: Data) -> None:
    """Tokenise both parts."""
    tokenizer = kind.build(split.train, data)
    _write_tokenizer(new, tokenizer)
    counts: list[Int[np.ndarray, "V"]] = []
    dtype = id_dtype(max(data.vocab_size, 256))
    for name, documents in zip(PARTS, split.parts, strict=True):
        ends = []  # in the end those of the held-out part, which is the last
        counts_V = np.zeros(data.vocab_size, np.int64)
        with (new / f"{name}.bin").open("wb") as file:
            for document in documents:
                for ids in tokenizer.encode_document(document):
                    found = np.bincount(ids, minlength=counts_V.size)
                    found[: counts_V.size] += counts_V
                    counts_V = found
                    ids.astype(dtype).tofile(file)
                ends.append(file.tell() // dtype.itemsize)
        counts.append(counts_V)
    for document in itertools.chain(*split.parts):
        if isinstance(document.place, Path) and cache.hash_of(document.place) != document.sha256:
            raise OSError(f"{document.name} has changed while it was read; try again")
    largest = max(counts_V.size for counts_V in counts) - 1
    if largest >= data.vocab_size:
        raise ConfigError("data.vocab_size", data.vocab_size, f"above {largest}, the largest byte of the text")
    np.save(new / COUNTS, np.stack(counts), allow_pickle=False)
    np.save(new / ENDS, np.array(ends, np.int64), allow_pickle=False)


def _kept(place: Path, kind: type[Tokenizer], split: Split, data: Data) -> Corpus:
    """What was made before, if it is as it was made."""
    hashes = cache.check(place)
    dtype = id_dtype(max(data.vocab_size, 256))
    tokens = []
    for name in PARTS:
        path = place / f"{name}.bin"
        tokens.append(Tokens([Document(str(path), path, 0, path.stat().st_size, dtype, hashes[path.name])]))
    content, model = _content(split, tokens), (place / MODEL).read_bytes()
    if model:
        content["text_tokenizer"] = {"sha256": hashes[MODEL]}
    counts_2xV, ends = (np.load(place / name, allow_pickle=False) for name in (COUNTS, ENDS))
    tokenizer = kind.load(model, data.vocab_size)
    about = _about(split, tokens, counts_2xV, tokenizer.unknown)
    return Corpus(tokenizer, tokens[0], tokens[1], counts_2xV[0], ends, content, about)
