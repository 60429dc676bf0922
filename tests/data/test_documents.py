"""Which files text is read from, how it is split, and how a document is read."""

import dataclasses
import os
import random

import numpy as np
import pytest

from configs import toy
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.data.documents import Document, break_of, read_split

DATA = dataclasses.replace(build_run(toy.get_config().to_dict()).data, source="text")


def letter(i):
    return bytes([ord("A") + i])


@pytest.fixture
def library(tmp_path):
    """Twenty files of 100 bytes in two folders; the letter of number i is all that file i holds."""
    for i in range(20):
        folder = tmp_path / ("a" if i < 10 else "b/c")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02}.{'txt' if i % 2 else 'md'}").write_bytes(letter(i) * 100)
    return tmp_path


def read(*paths, fraction=0.1, seed=0, heldout_paths=(), **fields):
    """The documents of both parts."""
    return read_split(
        dataclasses.replace(
            DATA,
            paths=tuple(map(str, paths)),
            heldout_paths=tuple(map(str, heldout_paths)),
            heldout_fraction=fraction,
            seed=seed,
            **fields,
        )
    )


def text_of(documents):
    """Their bytes, read in both ways."""
    text = b"".join(block for document in documents for _, block in document.blocks())
    assert b"".join(document.mapped().tobytes() for document in documents) == text
    return text


def files_of(documents):
    """Which files of the library a part holds, in their order; each must be whole."""
    part = np.frombuffer(text_of(documents), np.uint8)
    assert (np.reshape(part, (-1, 100)) == part[::100, None]).all()
    return (part[::100] - ord("A")).tolist()


def all_files(*paths):
    split = read(*paths, fraction=0.2)
    return sorted(files_of(split.train) + files_of(split.heldout))


def refusal(*paths, **fields):
    with pytest.raises(ConfigError) as error:
        read(*paths, **fields)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("fraction", "heldout"), [(0.05, 1), (0.104, 2), (0.096, 2), (0.1, 2), (0.5, 10)])
def test_whole_files_are_held_out(library, fraction, heldout):
    split = read(library, fraction=fraction)
    train_files, heldout_files = files_of(split.train), files_of(split.heldout)
    assert len(heldout_files) == heldout
    assert sorted(train_files + heldout_files) == list(range(20))
    assert train_files == sorted(train_files)
    assert heldout_files == sorted(heldout_files)


def test_the_seed_of_the_data_draws_the_held_out_files(library):
    def heldout(seed):
        return files_of(read(library, fraction=0.2, seed=seed).heldout)

    assert heldout(0) == heldout(0)
    assert heldout(0) != heldout(1)


def test_files_folders_and_globs(library, monkeypatch):
    assert all_files(library / "a") == list(range(10))
    assert all_files(library / "a" / "*.txt") == [1, 3, 5, 7, 9]
    assert all_files(library / "**" / "*.md") == list(range(0, 20, 2))
    assert all_files(library / "a" / "00.md", library / "b") == [0, *range(10, 20)]
    monkeypatch.setenv("HOME", str(library))
    assert all_files("~/a") == list(range(10))
    monkeypatch.chdir(library)
    assert all_files("b") == list(range(10, 20))


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    path = tmp_path / "[x].txt"
    path.write_bytes(b"0123456789")
    assert text_of(read(path, fraction=0.2).train) == b"01234567"


def test_copies_are_dropped(library):
    for i in range(20):
        (library / f"copy{i}").write_bytes(letter(i) * 100)
    (library / "empty").touch()
    assert all_files(library, library / "a") == list(range(20))
    split = read(library, library / "a")
    assert (split.files, split.duplicates, split.left_out) == (20, 20, {})


def test_a_single_file_is_cut_and_its_end_held_out(tmp_path):
    (tmp_path / "one").write_bytes(bytes(range(100, 200)))
    (tmp_path / "copy").write_bytes(bytes(range(100, 200)))
    split = read(tmp_path, fraction=0.25)
    assert text_of(split.train) == bytes(range(100, 175))
    assert text_of(split.heldout) == bytes(range(175, 200))
    assert (split.files, split.duplicates) == (1, 1)


def test_a_text_is_cut_behind_the_nearest_line_end_else_at_a_token(tmp_path):
    lines = b"one two three\n" * 30
    (tmp_path / "one").write_bytes(lines)
    for tokenizer in ("bytes", "words", "bpe"):
        # 126 of 420 bytes are nine lines; two bytes more or less, too.
        for fraction in (0.3, 0.295, 0.305):
            split = read(tmp_path / "one", fraction=fraction, tokenizer=tokenizer)
            assert (text_of(split.train), text_of(split.heldout)) == (lines[:-126], lines[-126:])
    words = b"one two three " * 30
    (tmp_path / "one").write_bytes(words)
    for tokenizer in ("words", "bpe"):
        heldout = text_of(read(tmp_path / "one", fraction=0.3, tokenizer=tokenizer).heldout)
        assert heldout == words[-127:]
    assert text_of(read(tmp_path / "one", fraction=0.3).heldout) == words[-126:]
    (tmp_path / "one").write_bytes("éééé".encode())
    split = read(tmp_path / "one", fraction=0.4, tokenizer="bpe")
    assert text_of(split.train).decode() + text_of(split.heldout).decode() == "éééé"
    assert len(text_of(split.train)) == 4


def test_the_default_is_the_text_of_python():
    split = read()
    train, heldout = text_of(split.train), text_of(split.heldout)
    assert len(train) + len(heldout) > 5_000_000
    assert 0.09 <= len(heldout) / (len(train) + len(heldout)) <= 0.11
    both = train + b"\n" + heldout
    assert b"class OrderedDict" in both  # the standard library
    assert b"class TestCase(" in both
    assert b"class BaseTest(" not in both  # its tests
    assert b"import jax" not in both  # installed packages
    assert text_of(read(seed=1).heldout) != heldout


def test_files_that_are_named_are_held_out(library):
    split = read(library / "a", heldout_paths=[library / "b"])
    assert (files_of(split.train), files_of(split.heldout)) == (list(range(10)), list(range(10, 20)))
    # What is held out is not trained on, even if both name it.
    split = read(library, heldout_paths=[library / "a" / "0*.txt"])
    assert files_of(split.heldout) == [1, 3, 5, 7, 9]
    assert files_of(split.train) == [0, 2, 4, 6, 8, *range(10, 20)]
    assert refusal(library / "a", heldout_paths=[library]).startswith("data.heldout_paths = ")
    message = refusal(library, heldout_paths=[library / "none"])
    assert message.startswith("data.heldout_paths = ")
    assert message.endswith("existing files or folders, or globs that match some")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a b\nc d\ne f", "a b\nc d\n"),
        ("a b c", "a b"),
        ("abc", "ab"),
        ("aé", "a"),
        ("a漢", "a"),
        ("😀😀", "😀"),
        (" a", " "),
        ("a", "a"),
    ],
)
def test_texts_are_broken_where_it_does_least_harm(text, first):
    assert text.encode()[: break_of(text.encode())].decode() == first


def test_blocks_are_text_and_make_up_the_document():
    rng = random.Random(0)
    text = "".join(rng.choice(["a", " ", "\n", "é", "漢", "😀"]) for _ in range(2000))
    raw = text.encode()
    for size in (5, 7, 100, 10**6):
        document = Document("x", raw, 0, len(raw), np.dtype(np.uint8), "")
        blocks = list(document.blocks(size))
        assert "".join(block.decode() for _, block in blocks) == text
        assert all(raw[offset:].startswith(block) for offset, block in blocks)
        assert max(len(block) for _, block in blocks) <= size + 100


def test_a_file_that_becomes_shorter_is_noticed(tmp_path):
    (tmp_path / "one").write_bytes(b"x" * 100)
    (document,) = read(tmp_path / "one").train
    (tmp_path / "one").write_bytes(b"x" * 50)
    with pytest.raises(OSError, match="has become shorter"):
        list(document.blocks())


def test_missing_files_are_refused(tmp_path):
    path = tmp_path / "none*.txt"
    assert refusal(path) == (
        f"data.paths = {str(path)!r} is not possible; allowed: existing files or folders, or globs that match some"
    )


def test_empty_text_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    assert refusal(tmp_path / "empty").endswith("at least one file that is not empty")
    assert refusal(tmp_path).startswith("data.paths = ")


def test_unreadable_files_are_refused(tmp_path):
    # A link to itself cannot be read by anyone, not even by root.
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    message = refusal(tmp_path / "loop")
    assert message.startswith(f"data.paths = {str(tmp_path / 'loop')!r}")
    assert "files that can be read" in message


@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_files_of_ids_are_no_text(tmp_path, tokenizer, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"text")
    assert refusal(path, tokenizer=tokenizer) == (
        f"data.paths = {str(path)!r} is not possible; allowed: text; .bin and .npy files need data.tokenizer = 'ids'"
    )


def test_the_text_of_python_holds_no_ids():
    assert refusal(tokenizer="ids").startswith("data.paths = ()")
