"""Real text: which files it is read from, how it is split, and the windows of the stream."""

import dataclasses
import hashlib
import os

import jax
import numpy as np
import pytest

from configs import toy
from tied_lm.config import ConfigError, build_run
from tied_lm.streams import TextStream
from tied_lm.text import read_split

DATA = dataclasses.replace(build_run(toy.get_config().to_dict()).data, source="text", batch_size=4, length=8)


@pytest.fixture
def library(tmp_path):
    """Twenty files of 100 bytes in two folders; byte i is all that file i holds."""
    for i in range(20):
        folder = tmp_path / ("a" if i < 10 else "b/c")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02}.{'txt' if i % 2 else 'md'}").write_bytes(bytes([i]) * 100)
    return tmp_path


def files_of(part):
    """Which files of the library a part holds, in their order; each must be whole."""
    assert (np.reshape(part, (-1, 100)) == part[::100, None]).all()
    return part[::100].tolist()


train_batches = jax.jit(lambda stream, steps: jax.vmap(stream.batch)(steps))
heldout_batches = jax.jit(lambda stream, indices: jax.vmap(stream.heldout)(indices))


def all_files(*paths):
    split = read_split(tuple(str(p) for p in paths), 0.1, 0)
    return sorted(files_of(split.train) + files_of(split.heldout))


def stream(*paths, seed=0, data_seed=0, **fields):
    paths = tuple(str(p) for p in paths)
    return TextStream.build(dataclasses.replace(DATA, paths=paths, seed=data_seed, **fields), seed)


@pytest.mark.parametrize(("fraction", "heldout"), [(0.01, 1), (0.06, 2), (0.1, 2), (0.5, 10), (0.999, 19)])
def test_whole_files_are_held_out(library, fraction, heldout):
    split = read_split((str(library),), fraction, 0)
    train_files, heldout_files = files_of(split.train), files_of(split.heldout)
    assert len(heldout_files) == heldout
    assert sorted(train_files + heldout_files) == list(range(20))
    assert train_files == sorted(train_files)
    assert heldout_files == sorted(heldout_files)


def test_the_seed_of_the_data_draws_the_held_out_files(library):
    def heldout(seed):
        return files_of(read_split((str(library),), 0.2, seed).heldout)

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
    assert read_split((str(path),), 0.2, 0).train.tobytes() == b"01234567"


def test_copies_are_dropped(library):
    for i in range(20):
        (library / f"copy{i}").write_bytes(bytes([i]) * 100)
    (library / "empty").touch()
    assert all_files(library, library / "a") == list(range(20))


def test_a_single_file_is_cut_and_its_end_held_out(tmp_path):
    (tmp_path / "one").write_bytes(bytes(range(100)))
    (tmp_path / "copy").write_bytes(bytes(range(100)))
    split = read_split((str(tmp_path),), 0.25, 0)
    assert split.train.tolist() == list(range(75))
    assert split.heldout.tolist() == list(range(75, 100))


def test_the_default_is_the_text_of_python():
    split = read_split((), 0.1, 0)
    total = split.train.size + split.heldout.size
    assert total > 5_000_000
    assert 0.1 <= split.heldout.size / total < 0.12
    both = split.train.tobytes() + b"\n" + split.heldout.tobytes()
    assert b"class OrderedDict" in both  # the standard library
    assert b"class TestCase(" in both
    assert b"class BaseTest(" not in both  # its tests
    assert b"import jax" not in both  # installed packages
    assert read_split((), 0.1, 1).heldout.tobytes() != split.heldout.tobytes()


def test_training_windows_lie_in_the_training_text(tmp_path):
    # The whole of a cut file can be told from any window: each byte is one more than the last.
    (tmp_path / "one").write_bytes(bytes(range(200)))
    s = stream(tmp_path / "one", heldout_fraction=0.25)
    batches = train_batches(s, np.arange(400))
    assert batches.inputs.shape == (400, 4, 8)
    assert batches.mask.all()
    np.testing.assert_array_equal(batches.targets, batches.inputs + 1)
    np.testing.assert_array_equal(batches.inputs[..., 1:], batches.inputs[..., :-1] + 1)
    # Every start is drawn, to the last one that fits, and not one beyond.
    assert np.unique(batches.inputs[..., 0]).tolist() == list(range(150 - 8))


def test_held_out_windows_are_disjoint_and_complete(tmp_path):
    (tmp_path / "one").write_bytes(bytes(range(200)))
    s = stream(tmp_path / "one", heldout_fraction=0.28)
    # 56 bytes are 6 windows of 8 targets: a seventh would lack its last target.
    assert s.heldout_tokens == 48
    batches = heldout_batches(s, np.arange(3))
    mask = np.asarray(batches.mask)
    assert mask.sum(axis=(1, 2)).tolist() == [32, 16, 0]
    assert (mask == mask[..., :1]).all()
    assert np.sort(batches.inputs[mask]).tolist() == list(range(144, 192))
    assert np.sort(batches.targets[mask]).tolist() == list(range(145, 193))
    np.testing.assert_array_equal(batches.targets, batches.inputs + 1)
    assert not (np.diff(batches.inputs[0, :, 0]) == 8).all()  # a random order


def test_no_held_out_file_is_trained_on(library):
    s = stream(library, heldout_fraction=0.3)
    trained = np.unique(train_batches(s, np.arange(300)).inputs)
    held = np.unique(heldout_batches(s, np.arange(20)).inputs)
    assert len(held) == 6
    assert sorted([*trained, *held]) == list(range(20))


def test_batches_depend_on_seed_and_step_alone(library):
    def batch(step, after=(), **kwargs):
        s = stream(library, **kwargs)
        for other in after:
            s.batch(other)
        return np.asarray(s.batch(step).inputs).tolist(), np.asarray(s.heldout(1).inputs).tolist()

    train, heldout = batch(3)
    assert batch(3, after=(0, 9)) == (train, heldout)
    assert batch(4)[0] != train
    assert batch(3, seed=1)[0] != train
    assert batch(3, seed=1)[1] == heldout
    assert batch(3, data_seed=1)[1] != heldout
    s = stream(library)
    assert np.asarray(jax.jit(lambda s, step: s.batch(step))(s, 3).inputs).tolist() == train
    assert np.asarray(stream(library, seed=1).with_seed(0).batch(3).inputs).tolist() == train


def test_frequencies_and_hashes_are_those_of_the_text(tmp_path):
    (tmp_path / "one").write_bytes(b"aaab" * 10 + b"cd" * 10)
    s = stream(tmp_path / "one", heldout_fraction=1 / 3)
    frequencies = s.frequencies
    assert frequencies.shape == (256,)
    assert frequencies[ord("a")] == 0.75
    assert frequencies[ord("b")] == 0.25
    assert frequencies.sum() == 1
    assert s.content == {
        "text_train": {"bytes": 40, "sha256": hashlib.sha256(b"aaab" * 10).hexdigest()},
        "text_heldout": {"bytes": 20, "sha256": hashlib.sha256(b"cd" * 10).hexdigest()},
    }
    assert s.entropy is None
    assert s.log_likelihood(np.array([1]), np.array([2])) is None


def test_tokens_are_shown_as_what_they_are(tmp_path):
    (tmp_path / "one").write_bytes(b"text" * 100)
    strings = stream(tmp_path / "one").token_strings
    assert [strings[i] for i in (10, 32, 65, 126, 127, 255)] == ["<0x0A>", "<0x20>", "A", "~", "<0x7F>", "<0xFF>"]


def refusal(*paths, **fields):
    with pytest.raises(ConfigError) as error:
        stream(*paths, **fields)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_missing_files_are_refused(tmp_path):
    path = tmp_path / "none*.txt"
    message = refusal(path)
    assert (
        message
        == f"data.paths = {str(path)!r} is not possible; allowed: existing files or folders, or globs that match some"
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


def test_text_shorter_than_one_sequence_is_refused(tmp_path):
    (tmp_path / "one").write_bytes(b"x" * 18)
    assert stream(tmp_path / "one", heldout_fraction=0.5).heldout_tokens == 8
    (tmp_path / "one").write_bytes(b"x" * 17)
    message = refusal(tmp_path / "one", heldout_fraction=0.5)
    assert message.startswith("data.paths = ")
    assert "held-out part has data.length + 1 = 9 bytes; it has 8" in message
    message = refusal(tmp_path / "one", heldout_fraction=0.9)
    assert "training part has data.length + 1 = 9 bytes; it has 2" in message


def test_a_vocabulary_without_the_largest_byte_is_refused(tmp_path):
    (tmp_path / "one").write_bytes(b"az" * 100)
    assert refusal(tmp_path / "one", vocab_size=122) == (
        "data.vocab_size = 122 is not possible; allowed: above 122, the largest byte of the text"
    )
    assert stream(tmp_path / "one", vocab_size=123).vocab_size == 123
