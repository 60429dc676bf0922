"""Files of ids, and what is refused as one."""

import dataclasses

import numpy as np
import pytest

from configs import toy
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.data.corpus import open_corpus, whole_vocabulary

DATA = dataclasses.replace(
    build_run(toy.get_config().to_dict()).data, source="text", tokenizer="ids", vocab_size=1000, heldout_fraction=0.25
)


def corpus(*paths, **fields):
    return open_corpus(dataclasses.replace(DATA, paths=tuple(map(str, paths)), **fields))


def refusal(*paths, **fields):
    with pytest.raises(ConfigError) as error:
        corpus(*paths, **fields)
    message = str(error.value)
    assert "\n" not in message
    return message


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, n)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_files(tmp_path, dtype):
    ids(80).astype(dtype).tofile(tmp_path / "x.bin")
    c = corpus(tmp_path / "x.bin", bin_dtype=dtype)
    assert (c.train.size, c.heldout.size) == (60, 20)
    np.testing.assert_array_equal(c.train.read(0, 60), ids(80)[:60])
    np.testing.assert_array_equal(c.heldout.read(0, 20), ids(80)[60:])
    np.testing.assert_array_equal(c.counts_V, np.bincount(ids(80)[:60], minlength=1000))


@pytest.mark.parametrize("dtype", ["uint16", "int64", ">i4", "uint64", "int16"])
def test_npy_files(tmp_path, dtype, corpora):
    before = set(corpora.glob("*"))
    np.save(tmp_path / "x.npy", ids(80).astype(dtype))
    c = corpus(tmp_path / "x.npy")
    np.testing.assert_array_equal(c.train.read(0, 60), ids(80)[:60])
    np.testing.assert_array_equal(c.heldout.read(0, 20), ids(80)[60:])
    np.testing.assert_array_equal(c.counts_V, np.bincount(ids(80)[:60], minlength=1000))
    assert set(corpora.glob("*")) == before  # read where they are


def test_several_files_are_one_sequence(tmp_path):
    for i in range(3):
        ids(50, i).astype(np.uint16).tofile(tmp_path / f"{i}.bin")
    np.save(tmp_path / "held.npy", ids(30, 9))
    c = corpus(tmp_path / "*.bin", heldout_paths=(str(tmp_path / "held.npy"),))
    whole = np.concatenate([ids(50, i) for i in range(3)])
    np.testing.assert_array_equal(c.train.read(0, 150), whole)
    np.testing.assert_array_equal(c.heldout.read(0, 30), ids(30, 9))
    assert {name: (part["bytes"], part["tokens"]) for name, part in c.content.items()} == {
        "text_train": (300, 150),
        "text_heldout": (240, 30),
    }


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.append(ids(999), 70_000))
    path = str(tmp_path / "x.npy")
    assert refusal(path, vocab_size=50_257) == (
        f"data.vocab_size = 50257 is not possible; allowed: above 70,000, which is id number 999 (from 0) in {path}"
    )
    assert corpus(path, vocab_size=70_001).train.size == 750
    np.save(path, np.append(ids(999), -1))
    assert (
        refusal(path)
        == f"data.paths = {path!r} is not possible; allowed: ids of 0 or more; it holds -1 as number 999 (from 0)"
    )


def test_every_id_of_a_large_file_is_looked_at(tmp_path):
    many = np.zeros(3_000_000, np.uint16)
    many[2_500_000] = 1000
    many.tofile(tmp_path / "x.bin")
    assert "above 1,000, which is id number 2,500,000 (from 0) in" in refusal(tmp_path / "x.bin")


def test_broken_files_are_refused(tmp_path):
    def said(path, allowed):
        return f"data.paths = {str(path)!r} is not possible; allowed: {allowed}"

    path = tmp_path / "x.bin"
    path.write_bytes(b"abc")
    assert refusal(path) == said(path, "whole ids of 2 bytes (uint16); the file has 3 bytes of them")
    path = tmp_path / "x.npy"
    arrays = "arrays of whole numbers in one dimension; this is "
    np.save(path, np.ones(5))
    assert refusal(path) == said(path, arrays + "float64 of shape (5,)")
    np.save(path, np.ones((5, 2), int))
    assert refusal(path) == said(path, arrays + "int64 of shape (5, 2)")
    np.save(path, np.array([True, False]))
    assert refusal(path) == said(path, arrays + "bool of shape (2,)")
    np.save(path, np.ones(5, int))
    path.write_bytes(path.read_bytes()[:-3])
    assert refusal(path).startswith(said(path, "files that NumPy can map"))
    path.write_bytes(b"text")
    assert refusal(path).startswith(said(path, "files that NumPy can map"))
    path = tmp_path / "x.txt"
    path.write_bytes(b"text")
    assert refusal(path) == said(path, ".bin and .npy files, with data.tokenizer = 'ids'")


def test_what_a_file_holds_is_never_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    np.save(tmp_path / "x.npy", np.array([Harm()], dtype=object), allow_pickle=True)
    assert "files that NumPy can map" in refusal(tmp_path / "x.npy")
    assert not (tmp_path / "harm").exists()


def test_ids_beyond_the_type_of_the_file_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    ids(400).astype("uint16").tofile(path)
    message = refusal(str(path), vocab_size=70_000)
    assert message == (
        "data.bin_dtype = 'uint16' is not possible; allowed: "
        "uint32: ids up to data.vocab_size - 1 = 69,999 are beyond uint16"
    )
    assert corpus(str(path), vocab_size=65_536).train.size == 300


@pytest.mark.parametrize(
    ("written", "read", "vocab_size"),
    [
        ("uint32", "uint16", 1000),
        ("int64", "uint16", 1000),
        ("uint32", "uint16", 60_000),
        ("int64", "uint16", 60_000),
        ("int64", "uint32", 1000),
        ("int64", "uint32", 128_000),
        ("uint16", "uint32", 60_000),
        ("uint16", "int64", 60_000),
        ("uint32", "int64", 128_000),
        ("uint16", "uint32", 200),
        ("uint16", "int64", 200),
    ],
)
def test_ids_of_another_type_are_noticed(tmp_path, written, read, vocab_size):
    path = tmp_path / "x.bin"
    np.random.default_rng(0).integers(0, vocab_size, 4000).astype(written).tofile(path)
    message = refusal(path, bin_dtype=read, vocab_size=min(vocab_size, 65_536))
    assert message.startswith(f"data.bin_dtype = {read!r} is not possible; allowed: ")
    assert f"{written}, of which the ids in {path} look to be" in message


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_ids_with_their_high_bytes_first_are_noticed(tmp_path, dtype):
    path = tmp_path / "x.bin"
    np.random.default_rng(0).integers(0, 200, 4000).astype(np.dtype(dtype).newbyteorder(">")).tofile(path)
    told = refusal(path, bin_dtype=dtype, vocab_size=200)
    assert (
        told == f"data.paths = {str(path)!r} is not possible; allowed: little-endian ids; these look to be big-endian"
    )
    np.random.default_rng(0).integers(0, 60_000, 4000).astype(">u4").tofile(path)
    assert "look to be big-endian" in refusal(path, bin_dtype="uint16", vocab_size=60_000)


def test_types_of_ids_are_taken_as_said_otherwise(tmp_path):
    for name, values in {
        "small": ids(80) % 16,
        "zeros": np.zeros(100),
        "all": ids(4000),
        "few": ids(4000) % 256,
    }.items():
        for dtype in ("uint16", "uint32", "int64"):
            path = tmp_path / f"{name}{dtype}.bin"
            values.astype(dtype).tofile(path)
            assert corpus(path, bin_dtype=dtype).train.size == values.size * 3 // 4


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")], ids=["gpt-2", "llama-3"]
)
def test_headers_of_llm_c_are_skipped(tmp_path, magic, version, dtype):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, 4000
    path = tmp_path / "x.bin"
    path.write_bytes(header.tobytes() + ids(4000).astype(dtype).tobytes())
    c = corpus(path)
    np.testing.assert_array_equal(c.train.read(0, 3000), ids(4000)[:3000])
    np.testing.assert_array_equal(c.heldout.read(0, 1000), ids(4000)[3000:])
    path.write_bytes(path.read_bytes()[:-2])
    assert "its header tells of 4,000 ids, and there are" in refusal(path)


def test_other_headers_are_refused_by_name(tmp_path):
    header = np.zeros(256, "<i4")
    header[:2] = 20240326, 3
    path = tmp_path / "x.bin"
    path.write_bytes(header.tobytes() + b"\0" * 4000)
    assert "this header is 20240326 version 3" in refusal(path)


def test_all_ids_have_a_row(tmp_path):
    np.save(tmp_path / "x.npy", np.append(ids(999), 70_000))
    assert whole_vocabulary(dataclasses.replace(DATA, vocab_size=0, paths=(str(tmp_path / "x.npy"),))) == 70_001
