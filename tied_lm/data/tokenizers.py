"""What turns text into token ids, and back."""

import abc
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import sentencepiece
from jaxtyping import Int, Integer

from tied_lm.checks import ConfigError
from tied_lm.config import Data
from tied_lm.data.documents import Document
from tied_lm.tokenstring import visible

UNKNOWN, END = "<unk>", "<eos>"


class Tokenizer(abc.ABC):
    """What the tokenizers share: a vocabulary of V rows, whose first ids are all in use."""

    perplexity: ClassVar[bool] = True  # whether it means something for these tokens
    unknown: ClassVar[int | None] = None  # the row of what has no row

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    @classmethod
    def build(cls, documents: Sequence[Document], data: Data) -> "Tokenizer":
        """One made for the training documents. A `data.vocab_size` of 0 stands for all that they have.

        Raises:
            ConfigError: they have no such vocabulary.
        """
        return cls(data.vocab_size)

    @classmethod
    def load(cls, model: bytes, vocab_size: int) -> "Tokenizer":
        """The one whose `model` is given."""
        return cls(vocab_size)

    @property
    def model(self) -> bytes:
        """What was learned from the documents, as the content of a file."""
        return b""

    @abc.abstractmethod
    def encode_document(self, document: Document) -> Iterator[Integer[np.ndarray, "N"]]:
        """Its ids, chunk by chunk.

        Raises:
            ConfigError: it is no text of the encoding that the tokenizer reads.
        """

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "N"]) -> str:
        """The text of ids."""

    @property
    @abc.abstractmethod
    def strings(self) -> list[str]:
        """Each token as it is shown."""

    @property
    def sizes(self) -> Int[np.ndarray, "V"] | None:
        """Bytes of text that each token stands for; None if that is not known."""
        return None


class Bytes(Tokenizer):
    """Each byte is a token."""

    perplexity = False

    @classmethod
    def build(cls, documents: Sequence[Document], data: Data) -> "Tokenizer":
        return cls(data.vocab_size or 256)

    def encode_document(self, document: Document) -> Iterator[Integer[np.ndarray, "N"]]:
        for _, block in document.blocks():
            yield np.frombuffer(block, np.uint8)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "N"]) -> str:
        """What is no UTF-8, and what is no byte, becomes U+FFFD."""
        return b"".join(bytes([i]) if i < 256 else "\ufffd".encode() for i in ids).decode(errors="replace")

    @property
    def strings(self) -> list[str]:
        return [visible(bytes([i])) if i < 256 else f"<0x{i:X}>" for i in range(self.vocab_size)]

    @property
    def sizes(self) -> Int[np.ndarray, "V"]:
        return np.ones(self.vocab_size, np.int32)


class Words(Tokenizer):
    """Words between white space, and <eos> at the end of each line: the layout of the files of PTB and WikiText.

    Row 0 is <unk>, which stands for every other word and for that word itself, and row 1 is <eos>; both always have
    a row. Then follow the words of the training text, the most frequent first, equally frequent ones by their code
    points.
    """

    unknown = 0

    def __init__(self, words: Sequence[str]):
        super().__init__(len(words))
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(words)}

    @classmethod
    def build(cls, documents: Sequence[Document], data: Data) -> "Tokenizer":
        counts: Counter[str] = Counter()
        for document in documents:
            for text in _decoded(document, "words"):
                counts.update(text.split())
        kept = [word for word, n in counts.items() if n >= data.min_count and word not in (UNKNOWN, END)]
        if data.vocab_size > len(kept) + 2:
            raise ConfigError(
                "data.vocab_size",
                data.vocab_size,
                f"at most {len(kept) + 2}: the words that occur {data.min_count} times or more in the training text, "
                f"{UNKNOWN} and {END}",
            )
        kept.sort(key=lambda word: (-counts[word], word))
        return cls([UNKNOWN, END, *(kept[: data.vocab_size - 2] if data.vocab_size else kept)])

    @classmethod
    def load(cls, model: bytes, vocab_size: int) -> "Tokenizer":
        return cls(json.loads(model))

    @property
    def model(self) -> bytes:
        return json.dumps(self.words).encode()

    def encode_document(self, document: Document) -> Iterator[Integer[np.ndarray, "N"]]:
        """A last line without a line end is a line, too."""
        ended = True
        for text in _decoded(document, "words"):
            yield np.array(self.encode(text), np.int64)
            ended = text.endswith("\n")
        if not ended:
            yield np.array([self.ids[END]])

    def encode(self, text: str) -> list[int]:
        """<eos> stands for each line end, so a text that ends without one can be continued."""
        *lines, last = text.split("\n")
        words = itertools.chain(*((*line.split(), END) for line in lines), last.split())
        return [self.ids.get(word, 0) for word in words]

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "N"]) -> str:
        text = " ".join("\n" if i == self.ids[END] else self.words[i] for i in ids)
        return re.sub(" ?\n ?", "\n", text)

    @property
    def strings(self) -> list[str]:
        return [visible(word) for word in self.words]


class Bpe(Tokenizer):
    """Byte-pair encoding by sentencepiece, which gives back any text exactly.

    A line end is always a token of its own. What sentencepiece would not give back (U+2581, which it takes for a
    space) is encoded as bytes.
    """

    unknown = 0
    TRAINING_BYTES: ClassVar[int] = 2**25  # of longer texts, blocks at even distances
    COVERAGES: ClassVar[tuple[float, ...]] = (0.9995, 0.99, 0.98)  # 0.98 is the lowest that sentencepiece takes
    CHARACTERS: ClassVar[int] = 4096  # of a line that are trained on as one

    def __init__(self, model: bytes):
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model = model
        super().__init__(self.processor.vocab_size())
        self.byte_ids = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]

    @classmethod
    def build(cls, documents: Sequence[Document], data: Data) -> "Tokenizer":
        if not data.vocab_size:
            raise ConfigError(
                "data.vocab_size",
                0,
                "at least 2 with data.tokenizer = 'bpe', which could join pieces up to whole lines",
            )
        message = ""
        # A small vocabulary has no room for all characters; those that it lacks are bytes.
        for coverage in cls.COVERAGES:
            model = io.BytesIO()
            try:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=cls._training_lines(documents),
                    model_writer=model,
                    model_type="bpe",
                    vocab_size=data.vocab_size,
                    character_coverage=coverage,
                    byte_fallback=True,
                    normalization_rule_name="identity",
                    add_dummy_prefix=False,
                    remove_extra_whitespaces=False,
                    allow_whitespace_only_pieces=True,
                    user_defined_symbols=["\n"],
                    bos_id=-1,
                    eos_id=-1,
                    max_sentence_length=4 * cls.CHARACTERS,
                    num_threads=1,
                    minloglevel=2,
                )
                return cls(model.getvalue())
            except RuntimeError as error:
                message = str(error)
            if "smaller than required_chars" not in message:
                break
        if high := re.search(r"<= (\d+)", message):
            allowed = f"at most {high[1]}: there are no more pairs to join in the training text"
        elif low := re.search(r"\d+ vs (\d+)", message):
            allowed = f"at least {low[1]}: the bytes, {UNKNOWN}, the line end, and the commonest characters"
        else:
            raise ConfigError("data.paths", data.paths, f"text that sentencepiece can learn from ({message.strip()})")
        raise ConfigError("data.vocab_size", data.vocab_size, allowed)

    @classmethod
    def _training_lines(cls, documents: Sequence[Document]) -> Iterator[str]:
        stride = 1 + sum(document.size for document in documents) // cls.TRAINING_BYTES
        texts = itertools.chain(*(_decoded(document, "bpe", 2**16) for document in documents))
        for text in itertools.islice(texts, 0, None, stride):
            for line in text.split("\n"):
                for start in range(0, len(line), cls.CHARACTERS):
                    yield line[start : start + cls.CHARACTERS]

    @classmethod
    def load(cls, model: bytes, vocab_size: int) -> "Tokenizer":
        return cls(model)

    @property
    def model(self) -> bytes:
        return self._model

    def encode_document(self, document: Document) -> Iterator[Integer[np.ndarray, "N"]]:
        for text in _decoded(document, "bpe"):
            yield np.array(self.encode(text), np.int64)

    def encode(self, text: str) -> list[int]:
        lines = re.findall(r"[^\n]*\n|[^\n]+", text)
        encoded = self.processor.encode(lines)
        decoded = self.processor.decode(encoded)
        checked = zip(lines, encoded, decoded, strict=True)
        exact = (ids if back == line else self._halves(line) for line, ids, back in checked)
        return list(itertools.chain.from_iterable(exact))

    def _halves(self, text: str) -> list[int]:
        """The ids of a text that sentencepiece does not give back: as bytes where it is one character."""
        if len(text) == 1:
            return [self.byte_ids[byte] for byte in text.encode()]
        ids: list[int] = []
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):
            found = self.processor.encode(half)
            ids += found if self.processor.decode(found) == half else self._halves(half)
        return ids

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "N"]) -> str:
        return self.processor.decode(list(ids))

    def _piece(self, i: int) -> bytes:
        """The text that a token stands for."""
        piece = self.processor.id_to_piece(i)
        return bytes([int(piece[3:5], 16)]) if self.processor.is_byte(i) else piece.replace("▁", " ").encode()

    @property
    def strings(self) -> list[str]:
        return [visible(self._piece(i)) for i in range(self.vocab_size)]

    @property
    def sizes(self) -> Int[np.ndarray, "V"]:
        return np.array([len(self._piece(i)) for i in range(self.vocab_size)], np.int32)


class Ids(Tokenizer):
    """No tokenizer: the files hold ids. As text they are numbers with spaces between them."""

    def encode_document(self, document: Document) -> Iterator[Integer[np.ndarray, "N"]]:
        return document.ids()

    def encode(self, text: str) -> list[int]:
        return read_ids(text, self.vocab_size)

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "N"]) -> str:
        return " ".join(map(str, ids))

    @property
    def strings(self) -> list[str]:
        return [str(i) for i in range(self.vocab_size)]


def read_ids(text: str, vocab_size: int) -> list[int]:
    """The ids that a text writes as decimal numbers.

    Raises:
        ConfigError: it is something else.
    """
    words = text.split()
    if not all(word.isascii() and word.isdecimal() and int(word) < vocab_size for word in words):
        raise ConfigError("prompt", text, f"ids from 0 to {vocab_size - 1}, with spaces between them")
    return [int(word) for word in words]


def _decoded(document: Document, tokenizer: str, *size: int) -> Iterator[str]:
    """The blocks of a document as text."""
    for offset, block in document.blocks(*size):
        try:
            yield block.decode()
        except UnicodeDecodeError as error:
            allowed = f"UTF-8 text with data.tokenizer = {tokenizer!r}; byte {offset + error.start:,} is none"
            raise ConfigError(document.field, document.name, allowed) from None


TOKENIZERS: dict[str, type[Tokenizer]] = {"bytes": Bytes, "words": Words, "bpe": Bpe, "ids": Ids}
