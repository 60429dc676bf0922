"""Windows of real text."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from configs import toy
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.data import text as textstream
from tied_lm.data.text import TextStream

DATA = dataclasses.replace(build_run(toy.get_config().to_dict()).data, source="text", batch_size=4, length=8)

train_batches = jax.jit(lambda ahead, steps: jax.vmap(ahead.batch)(steps))
heldout_batches = jax.jit(lambda windows, indices: jax.vmap(windows.heldout)(indices))


@pytest.fixture(autouse=True)
def few_ahead(monkeypatch):
    """Room for 100 batches on the device."""
    monkeypatch.setattr(textstream, "TOKENS_AHEAD", 4 * 9 * 100)


def stream(*paths, seed=0, data_seed=0, **fields):
    paths = tuple(str(p) for p in paths)
    return TextStream.build(dataclasses.replace(DATA, paths=paths, seed=data_seed, **fields), seed)


def batches_of(s, steps):
    """The training batches of steps 0, 1, ..., gathered with as few dispatches as can be."""
    most = s.most_updates
    parts = [train_batches(s.ahead(k, min(most, steps - k)), np.arange(k, k + most)) for k in range(0, steps, most)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:steps], *parts)


def heldout_of(s, tokens, count):
    return jax.tree.map(np.asarray, heldout_batches(s.heldout_ahead(tokens), np.arange(count)))


@pytest.fixture
def count_up(tmp_path):
    """A file in which each byte is one more than the last, so that its place can be told."""
    (tmp_path / "one").write_bytes(bytes(range(200)))
    return tmp_path / "one"


def test_training_windows_lie_in_the_training_text(count_up):
    batches = batches_of(stream(count_up, heldout_fraction=0.25), 400)
    assert batches.inputs.shape == (400, 4, 8)
    assert batches.inputs.dtype == np.int32
    assert batches.mask.all()
    np.testing.assert_array_equal(batches.targets, batches.inputs + 1)
    np.testing.assert_array_equal(batches.inputs[..., 1:], batches.inputs[..., :-1] + 1)
    # Every start is drawn, to the last one that fits, and not one beyond, and all are as likely.
    assert np.unique(batches.inputs[..., 0]).tolist() == list(range(150 - 8))
    assert stats.chisquare(np.bincount(batches.inputs[..., 0].ravel())).pvalue > 1e-3


def test_batches_are_drawn_independently(count_up):
    first = batches_of(stream(count_up, heldout_fraction=0.25, batch_size=5), 300).inputs[..., 0]
    assert len({tuple(row) for row in first.tolist()}) == 300
    assert abs(np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]) < 0.1
    assert np.abs(np.corrcoef(first.T) - np.eye(5)).max() < 0.25


def test_batches_depend_on_seed_and_step_alone(count_up):
    s = stream(count_up)
    expected = batches_of(s, 40).inputs
    for step, updates in ((0, 1), (7, 33), (39, 1), (13, 2)):
        found = train_batches(s.ahead(step, updates), np.arange(step, step + updates)).inputs
        np.testing.assert_array_equal(found, expected[step : step + updates])
    other = stream(count_up, seed=1)
    assert not np.array_equal(batches_of(other, 40).inputs, expected)
    np.testing.assert_array_equal(batches_of(other.with_seed(0), 40).inputs, expected)
    # The largest seed and a step beyond 32 bits of tokens.
    assert train_batches(s.with_seed(2**32 - 1).ahead(2**31 - 2, 1), np.array([2**31 - 2])).inputs.shape == (1, 4, 8)


def test_the_batches_are_the_same_on_every_machine(count_up):
    starts = batches_of(stream(count_up, seed=3), 3).inputs[..., 0]
    # Philox is the same with every version of NumPy, which its other methods of drawing whole numbers need not be.
    assert starts.tolist() == [[60, 77, 0, 29], [143, 123, 118, 131], [156, 140, 131, 85]]


@pytest.mark.parametrize("order", ["random", "contiguous"])
def test_one_program_serves_all_steps_lengths_and_seeds(count_up, order):
    s = stream(count_up, order=order)
    program = jax.jit(lambda ahead, step: ahead.batch(step))
    for seed, step, updates in ((0, 0, 1), (0, 5, 100), (7, 1000, 13)):
        program(s.with_seed(seed).ahead(step, updates), np.int32(step))
    assert program._cache_size() == 1
    with_other_sizes = stream(count_up, order=order, heldout_fraction=0.3)
    program(with_other_sizes.ahead(0, 1), np.int32(0))
    assert program._cache_size() == 1


def test_a_dispatch_is_bounded(count_up, monkeypatch):
    assert stream(count_up).most_updates == 100
    monkeypatch.setattr(textstream, "TOKENS_AHEAD", 10)
    s = stream(count_up)
    assert s.most_updates == 1  # one batch, however large
    assert s.ahead(3, 1).tokens.shape == (1, 4, 9)


def test_contiguous_batches_go_on_where_the_last_ended(tmp_path):
    # 173 training bytes, 21 windows of 8 targets and 4 bytes more; the place of each is known from the whole.
    text = np.random.default_rng(0).permutation(200).astype(np.uint8)
    (tmp_path / "one").write_bytes(text.tobytes())
    s = stream(tmp_path / "one", order="contiguous", heldout_fraction=27 / 200)
    assert s.corpus.train.size == 173
    place = np.zeros(256, int)
    place[text[:173]] = np.arange(173)
    batches = batches_of(s, 63)
    inputs, targets = place[batches.inputs], place[batches.targets]
    before = int(inputs.min())
    # By a plain loop: each lane goes through the windows in order, and is fresh at the first one alone.
    number = (inputs[0, :, 0] - before) // 8
    for k in range(63):
        for b in range(4):
            assert inputs[k, b].tolist() == list(range(before + 8 * number[b], before + 8 * number[b] + 8))
            assert targets[k, b].tolist() == [place + 1 for place in inputs[k, b]]
            assert batches.fresh[k, b] == (number[b] == 0)
            number[b] = number[b] + 1 if number[b] < 20 else 0
    # In 63 steps each lane has been 3 times round, and has not seen the bytes outside the windows.
    assert np.bincount(inputs[:, 0].ravel(), minlength=173).tolist() == [0] * before + [3] * 168 + [0] * (5 - before)
    assert set((np.diff(inputs[0, :, 0]) // 8 % 21).tolist()) == {5}
    starts = {tuple(place[batches_of(s.with_seed(seed), 21).inputs[:, 0, 0]]) for seed in range(100)}
    assert {min(lane) for lane in starts} == {0, 1, 2, 3, 4}
    assert {(lane[0] - min(lane)) // 8 for lane in starts} == set(range(21))
    found = train_batches(s.ahead(40, 3), np.arange(40, 43)).inputs
    np.testing.assert_array_equal(place[found], inputs[40:43])


def test_in_random_order_every_row_is_fresh(count_up):
    assert batches_of(stream(count_up), 5).fresh.all()


def test_held_out_windows_are_disjoint_and_complete(count_up):
    s = stream(count_up, heldout_fraction=0.28)
    # 56 bytes are 6 windows of 8 targets: a seventh would lack its last target.
    assert s.heldout_tokens == 48
    batches = heldout_of(s, 10**9, 3)
    mask = batches.mask
    assert mask.sum(axis=(1, 2)).tolist() == [32, 16, 0]
    assert (mask == mask[..., :1]).all()
    assert np.sort(batches.inputs[mask]).tolist() == list(range(144, 192))
    assert np.sort(batches.targets[mask]).tolist() == list(range(145, 193))
    assert not (np.diff(batches.inputs[0, :, 0]) == 8).all()  # a random order


def test_few_held_out_tokens_are_the_first_of_many(count_up):
    s = stream(count_up, heldout_fraction=0.5)
    many = heldout_of(s, 10**9, 3)
    few = heldout_of(s, 33, 2)
    assert s.heldout_ahead(33).tokens.shape == (2, 4, 9)
    np.testing.assert_array_equal(few.inputs, many.inputs[:2])
    np.testing.assert_array_equal(heldout_of(s.with_seed(5), 10**9, 3).inputs, many.inputs)
    assert not np.array_equal(heldout_of(stream(count_up, heldout_fraction=0.5, data_seed=1), 10**9, 3)[0], many[0])


def test_contiguous_held_out_windows_go_on_in_each_lane(count_up):
    s = stream(count_up, heldout_fraction=0.5, order="contiguous")
    # 99 targets are 12 windows: one for warming up, then 2 for each of 4 lanes.
    assert s.heldout_tokens == 64
    windows, batches = s.heldout_ahead(10**9), heldout_of(s, 10**9, 2)
    assert batches.mask.all()
    assert not batches.fresh.any()
    assert batches.inputs[0, :, 0].tolist() == [108, 124, 140, 156]
    np.testing.assert_array_equal(batches.inputs[1:, :, 0], batches.targets[:-1, :, -1])
    # What warms up is the window before, whose last target is the first input.
    np.testing.assert_array_equal(windows.warm_up, batches.inputs[0] - 8)
    scarce = stream(count_up, heldout_fraction=0.15, order="contiguous")
    assert scarce.heldout_tokens == 16
    few = heldout_of(scarce, 10**9, 1)
    assert few.mask[0, :, 0].tolist() == [True, True, False, False]
    assert few.inputs[0, :2, 0].tolist() == [178, 186]
    assert scarce.heldout_ahead(10**9).warm_up[:2, 0].tolist() == [170, 178]


@pytest.mark.parametrize("order", ["random", "contiguous"])
def test_of_a_large_held_out_part_windows_at_even_distances_are_used(tmp_path, monkeypatch, order):
    monkeypatch.setattr(textstream, "HELDOUT_WINDOWS", 20)
    text = np.repeat(np.arange(200, dtype=np.uint8), 8)
    (tmp_path / "one").write_bytes(text.tobytes() + b"\0")
    s = stream(tmp_path / "one", heldout_fraction=801 / 1601, order=order)
    assert s.heldout_tokens == 20 * 8
    windows = heldout_of(s, 10**9, 5).inputs[..., 0]
    if order == "random":
        assert np.sort(windows.ravel()).tolist() == list(range(100, 200, 5))
    else:
        assert windows.T.tolist() == [list(range(start, start + 5)) for start in (101, 125, 149, 173)]


def test_frequencies_are_those_of_the_text(tmp_path):
    (tmp_path / "one").write_bytes(b"aaab" * 10 + b"cd" * 10)
    s = stream(tmp_path / "one", heldout_fraction=1 / 3)
    frequencies = s.frequencies
    assert frequencies.shape == (256,)
    assert frequencies[ord("a")] == 0.75
    assert frequencies[ord("b")] == 0.25
    assert frequencies.sum() == 1
    assert {name: part["bytes"] for name, part in s.content.items()} == {"text_train": 40, "text_heldout": 20}
    (tmp_path / "one").write_bytes(b"aaab" * 10 + b"dc" * 10)
    changed = stream(tmp_path / "one", heldout_fraction=1 / 3)
    assert changed.content["text_train"]["sha256"] != s.content["text_train"]["sha256"]


def test_what_is_unknown_of_text(count_up):
    s = stream(count_up)
    assert s.entropy is None
    assert s.heldout_ahead(8).log_likelihood(np.array([1]), np.array([2])) is None


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "perplexity"), [("bytes", 256, False), ("bpe", 280, True), ("words", 7, True)]
)
@pytest.mark.untyped
def test_text_to_ids_and_back(tmp_path, tokenizer, vocab_size, perplexity):
    (tmp_path / "one").write_text("the cat sat on mat\n" * 200)
    s = stream(tmp_path / "one", tokenizer=tokenizer, vocab_size=vocab_size)
    ids = s.encode("the cat\n")
    assert s.decode(np.array(ids, np.int32)) == "the cat\n"
    assert len(s.token_strings) == vocab_size
    assert s.perplexity == perplexity
    counts = s.heldout_ahead(8).byte_counts(np.array(ids))
    assert counts is None if tokenizer == "words" else int(counts.sum()) == len("the cat\n")


def test_ids_as_text(tmp_path):
    (np.arange(400) % 300).astype(np.uint16).tofile(tmp_path / "x.bin")
    s = stream(tmp_path / "x.bin", tokenizer="ids", vocab_size=300)
    assert s.decode([3, 299]) == "3 299"
    assert s.encode("3 299") == [3, 299]
    assert s.perplexity
    assert s.heldout_ahead(8).byte_counts(np.array([1])) is None
    batch = batches_of(s, 1)
    np.testing.assert_array_equal(batch.targets, (batch.inputs + 1) % 300)


def test_a_byte_without_a_row_is_refused(tmp_path):
    (tmp_path / "one").write_bytes(b"az" * 100)
    assert stream(tmp_path / "one", vocab_size=123).encode("z") == [122]
    with pytest.raises(ConfigError, match=r"^data\.vocab_size = 123 is not possible; allowed: above 195, which"):
        stream(tmp_path / "one", vocab_size=123).encode("é")


def refusal(*paths, **fields):
    with pytest.raises(ConfigError) as error:
        stream(*paths, **fields)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_text_shorter_than_one_sequence_is_refused(tmp_path):
    (tmp_path / "one").write_bytes(b"x" * 18)
    assert stream(tmp_path / "one", heldout_fraction=0.5).heldout_tokens == 8
    (tmp_path / "one").write_bytes(b"x" * 17)
    message = refusal(tmp_path / "one", heldout_fraction=0.5)
    assert message.startswith("data.paths = ")
    assert "held-out part has data.length + 1 = 9 tokens; it has 8" in message
    message = refusal(tmp_path / "one", heldout_fraction=0.9)
    assert "training part has data.length + 1 = 9 tokens; it has 2" in message
    (tmp_path / "one").write_bytes(b"x")
    assert "training part has data.length + 1 = 9 tokens; it has 1" in refusal(tmp_path / "one")
    (tmp_path / "one").write_bytes(b"x" * 32)
    message = refusal(tmp_path / "one", heldout_fraction=0.5, order="contiguous")
    assert "held-out part has 2 * data.length + 1 = 17 tokens; it has 16" in message


def test_a_vocabulary_without_the_largest_byte_is_refused(tmp_path):
    (tmp_path / "one").write_bytes(b"az" * 100)
    assert refusal(tmp_path / "one", vocab_size=122) == (
        "data.vocab_size = 122 is not possible; allowed: above 122, the largest byte of the text"
    )
    assert stream(tmp_path / "one", vocab_size=123).vocab_size == 123


def test_an_unknown_tokenizer_is_refused(count_up):
    assert refusal(count_up, tokenizer="chars") == (
        "data.tokenizer = 'chars' is not possible; allowed: bytes | words | bpe | ids"
    )
