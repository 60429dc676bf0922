"""Text to ids and back."""

import collections
import dataclasses
import itertools
import random

import numpy as np
import pytest

from configs import toy
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.data.documents import Document
from tied_lm.data.tokenizers import TOKENIZERS, Bpe, Bytes, Ids, Words

DATA = build_run(toy.get_config().to_dict()).data


def document(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return Document("some.txt", raw, 0, len(raw), np.dtype(np.uint8), "")


def build(name, *texts, **fields):
    return TOKENIZERS[name].build([document(t) for t in texts], dataclasses.replace(DATA, tokenizer=name, **fields))


def ids_of(tokenizer, text):
    return np.concatenate([[], *tokenizer.encode_document(document(text))]).astype(int).tolist()


def refusal(name, *texts, **fields):
    with pytest.raises(ConfigError) as error:
        build(name, *texts, **fields)
    message = str(error.value)
    assert "\n" not in message
    return message


# --- bytes


def test_bytes_are_their_own_ids():
    tokenizer = build("bytes", "x", vocab_size=300)
    assert ids_of(tokenizer, bytes(range(256))) == list(range(256))
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 10]
    assert tokenizer.decode(tokenizer.encode("naïve 漢\0")) == "naïve 漢\0"
    assert tokenizer.decode([0xC3, 65, 299]) == "\ufffdA\ufffd"
    assert len(tokenizer.strings) == len(tokenizer.sizes) == 300
    assert [tokenizer.strings[i] for i in (10, 32, 65, 126, 127, 255, 256)] == (
        ["<0x0A>", "␣", "A", "~", "<0x7F>", "<0xFF>", "<0x100>"]
    )


# --- words

PTB = " no it was n't black monday \n but while the new york stock exchange did <unk> the \n\n the <unk> fell N %\n"


def usual_loader(text):
    """What the loaders of PTB and WikiText do: `line.split() + ["<eos>"]` for each line of a file."""
    return [word for line in text.splitlines() for word in [*line.split(), "<eos>"]]


def test_words_are_those_of_the_usual_loader():
    words = usual_loader(PTB)
    tokenizer = build("words", PTB, vocab_size=len(set(words)))
    # <unk> and <eos> are among the types, as in the 10,000 of PTB.
    assert set(tokenizer.words) == set(words)
    assert [tokenizer.words[i] for i in ids_of(tokenizer, PTB)] == words
    assert ids_of(tokenizer, PTB.rstrip("\n")) == ids_of(tokenizer, PTB)  # a last line without a line end


def test_rows_are_sorted_by_frequency_then_by_code_point():
    tokenizer = build("words", "b b c a a d d d e", vocab_size=6)
    assert tokenizer.words == ["<unk>", "<eos>", "d", "a", "b", "c"]
    assert tokenizer.strings == tokenizer.words
    assert ids_of(tokenizer, "e <unk> a") == [0, 0, 3, 1]
    assert ids_of(tokenizer, "\n\na\n") == [1, 1, 3, 1]
    assert tokenizer.sizes is None


def test_the_cut_off_makes_rare_words_unknown():
    tokenizer = build("words", "a a a b b c", "b", min_count=3, vocab_size=4)
    assert tokenizer.words == ["<unk>", "<eos>", "a", "b"]
    assert refusal("words", "a a a b b c", "b", min_count=3, vocab_size=5) == (
        "data.vocab_size = 5 is not possible; allowed: at most 4: the words that occur 3 times or more in the training "
        "text, <unk> and <eos>"
    )


def test_words_across_blocks_stay_whole(monkeypatch):
    rng = random.Random(0)
    text = "".join(rng.choice(["ab", "c", " ", "\n", "é", "  "]) for _ in range(3000))
    words = usual_loader(text)
    tokenizer = build("words", text, vocab_size=len(set(words) | {"<unk>"}))
    monkeypatch.setattr(Document.blocks, "__defaults__", (200,))
    assert [tokenizer.words[i] for i in ids_of(tokenizer, text)] == words


def test_words_to_text_and_back():
    tokenizer = build("words", "the cat sat\n", vocab_size=5)
    assert tokenizer.encode("the cat") == [tokenizer.ids["the"], tokenizer.ids["cat"]]  # can be continued
    assert tokenizer.decode(tokenizer.encode("the cat sat\n\nthe dog\n")) == "the cat sat\n\nthe <unk>\n"
    assert tokenizer.encode("") == []
    again = Words.load(tokenizer.model, 5)
    assert again.words == tokenizer.words
    assert again.encode("the mat\n") == tokenizer.encode("the mat\n")


# --- byte pairs

HOSTILE = [
    "a", "b", " ", "  ", "\t", "\n", "\r", "\u2581", "\0", "\ufeff", "é", "漢", "😀", "\u2028", "\x1c", " \u2047 ",
    "<unk>", "<0x0A>", "</s>", "e\u0301", "\x7f", "\ud7ff", "\U0010ffff", "the", "\n\n", "\xa0", "ﬁ", "Å",
]  # fmt: skip


def hostile(n, seed=0):
    rng = random.Random(seed)
    return "".join(rng.choice(HOSTILE) for _ in range(n))


@pytest.fixture(scope="module")
def bpe():
    return build("bpe", "the cat sat on the mat.\n" * 50 + hostile(3000), vocab_size=400)


def test_any_text_comes_back_exactly(bpe):
    sizes = bpe.sizes
    texts = ["", *HOSTILE, *(hostile(n, seed) for n in (2, 3, 10, 100, 1000) for seed in range(20))]
    for text in texts:
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert bpe.decode(itertools.chain(ids, ids)) == text + text  # in whatever place
        assert sizes[ids].sum() == len(text.encode())
        assert 0 not in ids  # <unk>


def test_a_document_is_encoded_as_its_text(bpe, monkeypatch):
    text = hostile(4000, 1)
    assert bpe.decode(ids_of(bpe, text)) == text
    monkeypatch.setattr(Document.blocks, "__defaults__", (100,))
    assert bpe.decode(ids_of(bpe, text)) == text


def test_byte_pairs_are_joined(bpe):
    assert bpe.vocab_size == len(bpe.strings) == len(bpe.sizes) == 400
    assert {"the", "␣the", "<0x0A>", "<0xFF>", "<unk>"} - {"␣the"} <= set(bpe.strings)
    text = "the cat sat on the mat.\n"
    assert len(bpe.encode(text)) < len(text) / 2


def test_the_same_text_gives_the_same_model(bpe):
    again = build("bpe", "the cat sat on the mat.\n" * 50 + hostile(3000), vocab_size=400)
    assert again.model == bpe.model
    assert Bpe.load(bpe.model, 400).encode("the dog") == bpe.encode("the dog")


def test_sentencepiece_is_silent(capfd):
    build("bpe", "a b c d " * 100, vocab_size=264)
    refusal("bpe", "a b c d " * 100, vocab_size=10_000)
    assert capfd.readouterr() == ("", "")


def test_impossible_vocabularies_say_what_is_possible():
    text = "the cat sat on the mat.\n" * 50
    message = refusal("bpe", text, vocab_size=50_000)
    high = int(message.split("at most ")[1].split(":")[0])
    assert message.startswith("data.vocab_size = 50000 is not possible; allowed: at most ")
    assert build("bpe", text, vocab_size=high).vocab_size == high
    message = refusal("bpe", text, vocab_size=200)
    low = int(message.split("at least ")[1].split(":")[0])
    assert message.startswith("data.vocab_size = 200 is not possible; allowed: at least ")
    assert build("bpe", text, vocab_size=low).vocab_size == low
    assert refusal("bpe", "\0" * 10, vocab_size=300).startswith("data.paths = ()")


def test_a_small_vocabulary_leaves_rare_characters_to_the_bytes():
    rare = "".join(map(chr, range(0x4E00, 0x4E40)))
    text = "the cat sat on the mat.\n" * 500 + rare
    tokenizer = build("bpe", text, vocab_size=290)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_of_a_long_text_blocks_at_even_distances_are_trained_on(monkeypatch):
    monkeypatch.setattr(Bpe, "TRAINING_BYTES", 2**19)
    lines = [f"word{i // 4000} " * 3 for i in range(40_000)]
    seen = collections.Counter(line[4:5] for line in Bpe._training_lines([document("\n".join(lines))]))
    assert 15_000 < sum(seen.values()) < 25_000
    assert {str(i) for i in range(10)} <= set(seen)


# --- ids


def test_ids_are_written_as_numbers():
    tokenizer = Ids(300)
    assert tokenizer.decode([3, 299]) == "3 299"
    assert tokenizer.encode(" 3  299\n") == [3, 299]
    assert tokenizer.strings[299] == "299"
    for text in ("300", "-1", "a", "1.5", "²"):
        with pytest.raises(ConfigError, match=r"^prompt = .* is not possible; allowed: ids from 0 to 299, with spaces"):
            tokenizer.encode(text)


# --- other encodings


@pytest.mark.parametrize("name", ["words", "bpe"])
def test_text_in_another_encoding_is_refused(name, monkeypatch):
    monkeypatch.setattr(Document.blocks, "__defaults__", (50,))
    raw = b"plain line\n" * 20 + "naïve".encode("latin-1") + b"\nplain line\n"
    expected = (
        f"data.paths = 'some.txt' is not possible; allowed: UTF-8 text with data.tokenizer = {name!r}; byte 222 is none"
    )
    monkeypatch.setattr(Bpe, "TRAINING_BYTES", 2**25)
    assert refusal(name, raw, vocab_size=300) == expected
    tokenizer = build(
        name, "plain line a b c d e f g h i j k l m n o p" * 20, vocab_size=10 if name == "words" else 290
    )
    with pytest.raises(ConfigError) as error:
        ids_of(tokenizer, raw)
    assert str(error.value) == expected
    assert ids_of(Bytes(256), raw) == list(raw)
