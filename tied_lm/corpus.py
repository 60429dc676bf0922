"""Token ids on the disk: made once for a text and kept in the user's cache folder, or files of ids as they are."""

import bisect
import fcntl
import hashlib
import itertools
import json
import mmap
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from tied_lm import folder
from tied_lm.config import ConfigError, Data, choose
from tied_lm.text import Split, read_split
from tied_lm.tokenizers import TOKENIZERS, Tokenizer

FORMAT = 1  # of what is kept; a higher one leaves older ones alone
META, MODEL, COUNTS = "meta.json", "tokenizer", "counts.npy"
PARTS = ("train", "heldout")
RELEASE_EVERY = 32  # windows
RESIDENT_BYTES = 2**28  # of a mapped file, which may stay in memory


class Tokens:
    """Token ids in mapped files, one behind the other as one sequence."""

    def __init__(self, parts: Sequence[Int[np.ndarray, "N"]]):
        large: list[Any] = [part.base for part in parts if part.nbytes > RESIDENT_BYTES]
        self.maps = [base for base in large if isinstance(base, mmap.mmap)]
        self.parts = [np.asarray(part) for part in parts if part.size]
        self.ends = np.cumsum([part.size for part in self.parts], dtype=np.int64).tolist()

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, count: int) -> Int[np.ndarray, "count"]:
        """The ids from `start` on; behind the last one follows the first."""
        found = []
        while count:
            i = bisect.bisect_right(self.ends, start)
            first = start - self.ends[i] + self.parts[i].size
            found.append(self.parts[i][first : first + count])
            count -= found[-1].size
            start = (start + found[-1].size) % self.size
        return found[0] if len(found) == 1 else np.concatenate(found)

    def read_windows(self, starts_N: Int[np.ndarray, "N"], windows_NxW: Int[np.ndarray, "N W"]) -> None:
        """Fill each row with the ids from its start on."""
        for n, (row, start) in enumerate(zip(windows_NxW, starts_N.tolist(), strict=True)):
            row[:] = self.read(start, row.size)
            # The system maps up to 2 MiB around each place that is read, and unmaps nothing by itself.
            if (n + 1) % RELEASE_EVERY == 0:
                for mapped in self.maps:
                    mapped.madvise(mmap.MADV_DONTNEED)


class Corpus(NamedTuple):
    """The tokens of a text, and what made them."""

    tokenizer: Tokenizer
    train: Tokens
    heldout: Tokens
    counts_V: Int[np.ndarray, "V"]  # in the training part
    content: dict[str, Any]  # what the config does not say of the text


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
    depends = {
        "format": FORMAT,
        "tokenizer": [data.tokenizer, data.vocab_size, data.min_count, version("sentencepiece")],
        "train": [document.identity for document in split.train],
        "heldout": [document.identity for document in split.heldout],
    }
    place = folder.cache_folder() / "corpora" / hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]
    if not place.exists():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("cache", str(place.parent), f"a folder that can be written ({error.strerror})") from None
        with place.with_suffix(".lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process that makes it is waited for
            if not place.exists():
                _make(place, kind, split, data)
    return _kept(place, kind, split, data)


def _content(split: Split, tokens: Sequence[Tokens]) -> dict[str, Any]:
    """Sizes and hashes of the two parts; a hash is that of the list of the files' own hashes and ranges."""
    return {
        f"text_{name}": {
            "bytes": sum(document.size for document in documents),
            "tokens": part.size,
            "sha256": hashlib.sha256("\n".join(document.identity for document in documents).encode()).hexdigest(),
        }
        for name, documents, part in zip(PARTS, split, tokens, strict=True)
    }


def _in_place(tokenizer: Tokenizer, split: Split) -> Corpus:
    """Files of ids, mapped as they are; each id is looked at once."""
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    for documents in split:
        for document in documents:
            for ids in tokenizer.encode_document(document):
                low, high = int(ids.min()), int(ids.max())
                if low < 0:
                    raise ConfigError("data.paths", document.name, f"ids of 0 or more; it holds {low}")
                if high >= tokenizer.vocab_size:
                    allowed = f"above {high:,}, which is an id in {document.name}"
                    raise ConfigError("data.vocab_size", tokenizer.vocab_size, allowed)
                if documents is split.train:
                    counts_V += np.bincount(ids.astype(np.int64), minlength=tokenizer.vocab_size)
    train, heldout = (Tokens([document.mapped() for document in documents]) for documents in split)
    return Corpus(tokenizer, train, heldout, counts_V, _content(split, (train, heldout)))


def _make(place: Path, kind: type[Tokenizer], split: Split, data: Data) -> None:
    """Tokenise both parts into a new folder, which gets its name once all is in it."""
    new = place.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    new.mkdir()
    try:
        tokenizer = kind.build(split.train, data)
        (new / MODEL).write_bytes(tokenizer.model)
        counts, largest = np.zeros(0, np.int64), 0
        for name, documents in zip(PARTS, split, strict=True):
            with (new / f"{name}.bin").open("wb") as file:
                for document in documents:
                    for ids in tokenizer.encode_document(document):
                        found = np.bincount(ids, minlength=counts.size)
                        largest = max(largest, found.size - 1)
                        if name == "train":
                            found[: counts.size] += counts
                            counts = found
                        ids.astype(id_dtype(max(data.vocab_size, 256))).tofile(file)
        for document in itertools.chain(*split):
            if isinstance(document.place, Path) and _hash(document.place) != document.sha256:
                raise OSError(f"{document.name} has changed while it was read; try again")
        if largest >= data.vocab_size:
            raise ConfigError("data.vocab_size", data.vocab_size, f"above {largest}, the largest byte of the text")
        np.save(new / COUNTS, np.pad(counts, (0, data.vocab_size - counts.size)), allow_pickle=False)
        hashes = {path.name: _hash(path) for path in sorted(new.iterdir())}
        folder.write_json(new / META, {"files": hashes, "sha256": _hash_of(hashes)})
        new.rename(place)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _kept(place: Path, kind: type[Tokenizer], split: Split, data: Data) -> Corpus:
    """What was made before, if it is as it was made."""
    try:
        meta = json.loads((place / META).read_text(encoding="utf-8"))
        hashes = meta["files"]
        sound = meta["sha256"] == _hash_of(hashes) and all(_hash(place / name) == hashes[name] for name in hashes)
    except (OSError, ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        raise ConfigError("cache", str(place), "an undamaged folder; remove it, and it will be made again")
    dtype = id_dtype(max(data.vocab_size, 256))
    paths = (place / f"{name}.bin" for name in PARTS)
    # An empty file cannot be mapped.
    train, heldout = (Tokens([np.memmap(p, dtype, "r")] if p.stat().st_size else []) for p in paths)
    content, model = _content(split, (train, heldout)), (place / MODEL).read_bytes()
    if model:
        content["text_tokenizer"] = {"sha256": hashes[MODEL]}
    counts_V = np.load(place / COUNTS, allow_pickle=False)
    return Corpus(kind.load(model, data.vocab_size), train, heldout, counts_V, content)
