"""Tokens on the disk: read as one sequence, made once, and refused when damaged."""

import dataclasses
import multiprocessing
import os
import shutil

import numpy as np
import pytest

from configs import toy
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.data import cache as cache_
from tied_lm.data import corpus as corpus_
from tied_lm.data.corpus import Tokens, id_dtype, open_corpus, whole_vocabulary
from tied_lm.data.documents import Document, told
from tied_lm.data.tokenizers import Bytes

DATA = dataclasses.replace(build_run(toy.get_config().to_dict()).data, source="text", heldout_fraction=0.25)
TEXT = "the cat sat on the mat.\nand the dog\n\n" * 60
SIZES = {"bytes": 256, "words": 9, "bpe": 290}


@pytest.fixture(params=SIZES)
def data(request, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    return dataclasses.replace(
        DATA, paths=(str(tmp_path / "a.txt"),), tokenizer=request.param, vocab_size=SIZES[request.param]
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("tied_lm.config.folder.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "corpora"


def folders(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


def held(ids):
    return Document("x", ids.tobytes(), 0, ids.nbytes, ids.dtype, "")


def test_files_are_one_sequence_that_wraps_around():
    parts = [np.arange(3), np.zeros(0, int), np.arange(3, 4), np.arange(4, 10)]
    tokens, whole = Tokens([held(part) for part in parts]), np.arange(10)
    assert tokens.size == 10
    for start in range(10):
        for count in range(1, 25):
            np.testing.assert_array_equal(tokens.read(start, count), np.resize(np.roll(whole, -start), count))
    windows = np.zeros((10, 4), np.uint8)
    tokens.read_windows(whole, windows)
    np.testing.assert_array_equal(windows, (whole[:, None] + np.arange(4)) % 10)


def test_large_maps_are_released(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_, "RESIDENT_BYTES", 100)
    (np.arange(50_000) % 251).astype(np.uint8).tofile(tmp_path / "x")
    tokens = Tokens([Document("x", tmp_path / "x", 0, 50_000, np.dtype(np.uint8), "")])
    windows = np.zeros((100, 7), np.uint8)
    tokens.read_windows(np.arange(100) * 400, windows)
    np.testing.assert_array_equal(windows, (np.arange(100)[:, None] * 400 + np.arange(7)) % 251)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65_536, "u2"), (65_537, "u4"), (2**32, "u4")]
)
def test_the_smallest_type_that_holds_every_id(vocab_size, dtype):
    assert id_dtype(vocab_size) == np.dtype(dtype)


def test_tokens_are_those_of_the_tokenizer(data, cache):
    c = open_corpus(data)
    train, heldout = (part.read(0, part.size) for part in (c.train, c.heldout))
    assert c.tokenizer.decode(train) + c.tokenizer.decode(heldout) == TEXT
    np.testing.assert_array_equal(c.counts_V, np.bincount(train, minlength=data.vocab_size))
    assert c.content["text_train"]["tokens"] == train.size
    assert c.content["text_train"]["bytes"] + c.content["text_heldout"]["bytes"] == len(TEXT)
    assert ("text_tokenizer" in c.content) == (data.tokenizer != "bytes")


def test_tokens_are_made_once(data, cache, monkeypatch):
    first = open_corpus(data)
    (place,) = folders(cache)
    monkeypatch.setattr(cache_, "_make", None)
    again = open_corpus(data)
    assert folders(cache) == [place]
    assert again.content == first.content
    np.testing.assert_array_equal(again.train.read(0, 100), first.train.read(0, 100))
    assert again.tokenizer.encode("the cat sat") == first.tokenizer.encode("the cat sat")


def test_the_same_text_elsewhere_is_the_same_corpus(data, cache, tmp_path):
    first = open_corpus(data)
    shutil.move(tmp_path / "a.txt", tmp_path / "b.txt")
    moved = dataclasses.replace(data, paths=(str(tmp_path / "b.txt"),))
    assert open_corpus(moved).content == first.content
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("change", ["text", "vocab_size", "min_count", "heldout_fraction", "tokenizer"])
def test_another_text_or_another_field_is_another_corpus(cache, tmp_path, change):
    (tmp_path / "a.txt").write_text(TEXT)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),), tokenizer="words", vocab_size=9)
    before = open_corpus(data).content
    if change == "text":
        (tmp_path / "a.txt").write_text(TEXT.replace("cat", "cow"))
    other = {"vocab_size": 7, "min_count": 2, "heldout_fraction": 0.5, "tokenizer": "bytes"}
    changed = (
        {} if change == "text" else {change: other[change]} | ({"vocab_size": 256} if change == "tokenizer" else {})
    )
    after = open_corpus(dataclasses.replace(data, **changed)).content
    assert len(folders(cache)) == 2
    assert (after == before) == (change == "min_count")  # no word is that rare


@pytest.mark.parametrize("name", ["train.bin", "heldout.bin", "counts.npy", "tokenizer", "meta.json"])
@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing"])
def test_a_damaged_corpus_is_refused(cache, tmp_path, name, damage):
    (tmp_path / "a.txt").write_text(TEXT)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),), tokenizer="words", vocab_size=9)
    open_corpus(data)
    (place,) = folders(cache)
    raw = (place / name).read_bytes()
    (place / name).unlink()
    if damage != "missing":
        flipped = raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]
        (place / name).write_bytes(flipped if damage == "flipped bit" else raw[:-1])
    if name == "meta.json" and damage == "truncated":
        (place / name).write_bytes(raw[:-10])
    damaged = {path.name: path.read_bytes() for path in place.iterdir()}
    with pytest.raises(ConfigError) as error:
        open_corpus(data)
    assert str(error.value) == (
        f"cache = {str(place)!r} is not possible; allowed: an undamaged folder; remove it, and it will be made again"
    )
    assert {path.name: path.read_bytes() for path in place.iterdir()} == damaged
    shutil.rmtree(place)
    assert open_corpus(data).train.size > 100


def test_a_corpus_that_cannot_be_made_leaves_nothing(cache, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),))
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 116 is not possible; allowed: above 116, the largest"):
        open_corpus(dataclasses.replace(data, vocab_size=116))
    assert folders(cache) == []
    (tmp_path / "a.txt").write_bytes(TEXT.encode() + b"\xff\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        open_corpus(dataclasses.replace(data, tokenizer="words", vocab_size=5))
    assert folders(cache) == []
    (tmp_path / "a.txt").write_text(TEXT)
    with monkeypatch.context() as patched:
        patched.setattr(Bytes, "encode_document", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            open_corpus(data)
    assert folders(cache) == []
    assert open_corpus(data).train.size == len(TEXT) * 3 // 4


def test_a_file_that_changes_meanwhile_is_noticed(cache, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    encode = Bytes.encode_document

    def change(self, document):
        yield from encode(self, document)
        (tmp_path / "a.txt").write_text(TEXT.upper())

    monkeypatch.setattr(Bytes, "encode_document", change)
    with pytest.raises(OSError, match=r"a\.txt has changed while it was read"):
        open_corpus(dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),)))
    assert folders(cache) == []


def test_what_a_killed_process_left_is_no_hindrance(cache, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),))
    first = open_corpus(data)
    (place,) = folders(cache)
    place.rename(place.with_suffix(".new"))
    (place.with_suffix(".new") / "train.bin").write_bytes(b"half")
    assert open_corpus(data).content == first.content
    assert folders(cache) == [place]


def _open(data, place, start, sizes):
    from tied_lm.config import folder

    folder.cache_folder = lambda: place
    made, encode = [], Bytes.encode_document

    def counted(self, document: Document):
        made.append(document)
        return encode(self, document)

    Bytes.encode_document = counted
    start.wait()
    sizes.put((open_corpus(data).train.size, len(made), os.getpid()))


def test_two_processes_make_it_once(cache, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 3000)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),))
    context = multiprocessing.get_context("spawn")
    start, sizes = context.Event(), context.Queue()
    processes = [context.Process(target=_open, args=(data, cache.parent, start, sizes)) for _ in range(2)]
    for process in processes:
        process.start()
    start.set()
    found = [sizes.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert {size for size, *_ in found} == {len(TEXT) * 3000 * 3 // 4}
    assert sorted(made for _, made, _ in found) == [0, 2]
    assert len(folders(cache)) == 1


def test_what_another_user_can_have_written_is_not_trusted(cache, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),))
    open_corpus(data)
    (place,) = folders(cache)
    for path in (place, place / "train.bin", cache):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        with pytest.raises(ConfigError, match=r"^cache = .* what this user owns and nobody else can write"):
            open_corpus(data)
        path.chmod(mode)
    (place / "counts.npy").rename(tmp_path / "counts.npy")
    (place / "counts.npy").symlink_to(tmp_path / "counts.npy")
    with pytest.raises(ConfigError, match="nobody else can write"):
        open_corpus(data)
    (place / "counts.npy").unlink()
    (tmp_path / "counts.npy").rename(place / "counts.npy")
    assert open_corpus(data)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="what this user owns"):
        open_corpus(data)


def test_a_lock_that_is_a_link_is_not_followed(cache, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),))
    open_corpus(data)
    (place,) = cache.iterdir()  # no lock is left
    shutil.rmtree(place)
    (tmp_path / "precious").write_text("precious")
    place.with_suffix(".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"^cache = .*\.lock"):
        open_corpus(data)
    assert (tmp_path / "precious").read_text() == "precious"
    place.with_suffix(".lock").unlink()
    with pytest.raises(ConfigError, match=r"^data\.vocab_size"):
        open_corpus(dataclasses.replace(data, vocab_size=3))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("field", ["paths", "heldout_paths"])
def test_a_bad_byte_names_the_field_and_the_file(cache, tmp_path, field):
    (tmp_path / "good.txt").write_text(TEXT)
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    paths = {"paths": (str(tmp_path / "good.txt"),), field: (str(tmp_path / "bad.txt"),)}
    with pytest.raises(ConfigError, match=rf"^data\.{field} = '.*bad\.txt' is not possible; allowed: UTF-8 text"):
        open_corpus(dataclasses.replace(DATA, tokenizer="words", vocab_size=2, **paths))


def test_all_rows_that_a_text_has(cache, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    data = dataclasses.replace(DATA, paths=(str(tmp_path / "a.txt"),), vocab_size=0)
    assert whole_vocabulary(data) == 256
    for _ in range(2):
        assert whole_vocabulary(dataclasses.replace(data, tokenizer="words")) == 9
    assert len(folders(cache)) == 1
    with pytest.raises(ConfigError, match=r"at most 9"):
        open_corpus(dataclasses.replace(data, tokenizer="words", vocab_size=10))
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 0 is not possible; allowed: at least 2 with .*'bpe'"):
        whole_vocabulary(dataclasses.replace(data, tokenizer="bpe"))


def test_the_text_in_one_line(cache, tmp_path):
    tmp_path /= "texts"  # the cache is beside it
    tmp_path.mkdir()
    (tmp_path / "a.txt").write_text("a b c a\n" * 30 + "a\n")
    (tmp_path / "copy.txt").write_text("a b c a\n" * 30 + "a\n")
    (tmp_path / "held.txt").write_text("a new\n" * 10)
    (tmp_path / ".hidden").touch()
    data = dataclasses.replace(
        DATA, paths=(str(tmp_path),), heldout_paths=(str(tmp_path / "held.txt"),), tokenizer="words", vocab_size=4
    )
    assert told(open_corpus(data).about) == (
        "text: 2 files, 152 tokens trained on, 30 held out (16.48%), of them 19.74% and 33.33% <unk>, "
        "0 of 4 rows never seen, 1 duplicates dropped, left out: 1 hidden"
    )
    data = dataclasses.replace(data, tokenizer="bytes", vocab_size=256)
    assert "251 of 256 rows never seen" in told(open_corpus(data).about)
