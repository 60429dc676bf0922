"""The stream of real text: windows of its tokens, read from the disk as they are needed."""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tied_lm.batches import Batch
from tied_lm.config import ConfigError, Data
from tied_lm.corpus import Corpus, id_dtype, open_corpus
from tied_lm.text import FIELD

TOKENS_AHEAD = 2**20  # on the device for one dispatch, at most, unless one batch is more
HELDOUT_WINDOWS = 2**20  # of a larger held-out part so many, at even distances


@flax.struct.dataclass
class Windows:
    """The training windows of the steps from `first` on. K does not depend on how many a dispatch takes."""

    tokens: Int[Array, "K B L+1"]
    first: Int[Array, ""]

    def batch(self, step: Int[Array, ""]) -> Batch:
        """The training batch of a step."""
        window = jax.lax.dynamic_index_in_dim(self.tokens, step - self.first, keepdims=False)
        return _batch(window, jnp.ones(window.shape[0], bool))


@flax.struct.dataclass
class HeldoutWindows:
    """The first held-out windows."""

    tokens: Int[Array, "M B L+1"]
    exists: Bool[Array, "M B"]
    sizes: Int[Array, "V"] | None  # bytes of each token

    def heldout(self, index: int | Int[Array, ""]) -> Batch:
        """A held-out batch; past the last window it is masked."""
        exists = self.exists[index] & (index < self.exists.shape[0])
        return _batch(self.tokens[index], exists)

    def log_likelihood(self, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]) -> None:
        """Unknown for text."""
        return

    def byte_counts(self, targets: Int[Array, "*N"]) -> Int[Array, "*N"] | None:
        """Bytes of text that each token stands for; None if that is not known."""
        return None if self.sizes is None else self.sizes[targets]


def _batch(window: Int[Array, "B L+1"], exists: Bool[Array, "B"]) -> Batch:
    tokens = window.astype(jnp.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return Batch(inputs, targets, jnp.broadcast_to(exists[:, None], inputs.shape))


@dataclasses.dataclass(frozen=True)
class TextStream:
    """Windows of L + 1 tokens of a text. Training starts them anywhere, or (contiguous) where the last step ended.

    Contiguous: row b of a batch is a lane; lanes start at even distances, shifted by an offset that the seed draws,
    and go on behind the end of the text at its start. Row b of the next step begins with the last target of row b of
    this one. Held-out windows are disjoint; in a random order, or for contiguous ones in order in each lane.
    """

    corpus: Corpus
    data: Data
    seed: int

    entropy: ClassVar[None] = None  # unknown

    @classmethod
    def build(cls, data: Data, seed: int) -> "TextStream":
        corpus = open_corpus(data)
        for name, part in (("training", corpus.train), ("held-out", corpus.heldout)):
            if part.size < data.length + 1:
                raise ConfigError(
                    FIELD,
                    data.paths,
                    f"text whose {name} part has data.length + 1 = {data.length + 1} tokens; it has {part.size}",
                )
        return cls(corpus, data, seed)

    def with_seed(self, seed: int) -> "TextStream":
        """The same text in the order of another seed."""
        return dataclasses.replace(self, seed=seed)

    @property
    def vocab_size(self) -> int:
        return self.data.vocab_size

    @property
    def most_updates(self) -> int:
        """Updates that one dispatch can do."""
        return max(1, TOKENS_AHEAD // (self.data.batch_size * (self.data.length + 1)))

    def _draws(self, counter: int, count: int) -> Float[np.ndarray, "count"]:
        """Uniform in [0, 1), from a position in the seed's own sequence; the same with every version of NumPy."""
        name = int.from_bytes(hashlib.sha256(b"windows").digest()[:4], "little")
        bits = np.random.Philox(key=[self.seed, name], counter=counter).random_raw(count)
        return (bits >> 11) * 2.0**-53

    def _starts(self, step: int, updates: int) -> Int[np.ndarray, "updates B"]:
        """Where the windows of some steps begin in the training text."""
        rows, length, size = self.data.batch_size, self.data.length, self.corpus.train.size
        if self.data.order == "contiguous":
            offset = int(self._draws(0, 1)[0] * size)
            lanes = offset + np.arange(rows, dtype=np.int64) * (size // rows)
            return (lanes + np.arange(step, step + updates, dtype=np.int64)[:, None] * length) % size
        blocks = -(-rows // 4)  # a position of the sequence holds four numbers
        draws = self._draws(step * blocks, updates * blocks * 4).reshape(updates, -1)[:, :rows]
        return (draws * (size - length)).astype(np.int64)

    def ahead(self, step: int, updates: int) -> Windows:
        """What a dispatch of some updates needs, at most `most_updates`. A batch depends on seed and step alone."""
        tokens = np.zeros((self.most_updates, self.data.batch_size, self.data.length + 1), id_dtype(self.vocab_size))
        windows = tokens[:updates].reshape(-1, tokens.shape[-1])
        self.corpus.train.read_windows(self._starts(step, updates).ravel(), windows)
        return Windows(jnp.asarray(tokens), jnp.asarray(step, jnp.int32))

    def _heldout_windows(self) -> tuple[int, int]:
        """Held-out windows that there are, and of these the ones in use."""
        windows, rows = (self.corpus.heldout.size - 1) // self.data.length, self.data.batch_size
        used = min(windows, HELDOUT_WINDOWS)
        # Lanes are equally long.
        return windows, used // rows * rows if self.data.order == "contiguous" and used >= rows else used

    def _heldout_order(self) -> Int[np.ndarray, "W"]:
        """The numbers of the windows in use, batch by batch."""
        windows, used = self._heldout_windows()
        if self.data.order == "contiguous":
            lanes = min(self.data.batch_size, used)
            return (np.arange(lanes) * (windows // lanes) + np.arange(used // lanes)[:, None]).ravel()
        # In random order any number of them is a fair sample.
        return np.random.default_rng(self.data.seed).permutation(np.arange(used) * windows // used)

    @property
    def heldout_tokens(self) -> int:
        """Target tokens in all held-out windows."""
        return self._heldout_windows()[1] * self.data.length

    def heldout_ahead(self, tokens: int) -> HeldoutWindows:
        """The held-out windows of the first so many target tokens, on the device; the same for every seed."""
        rows, length = self.data.batch_size, self.data.length
        order = self._heldout_order()
        batches = -(-min(tokens, order.size * length) // (rows * length))
        order = order[: batches * rows]
        windows = np.zeros((batches * rows, length + 1), id_dtype(self.vocab_size))
        self.corpus.heldout.read_windows(order * length, windows[: order.size])
        exists = np.arange(batches * rows) < order.size
        sizes = self.corpus.tokenizer.sizes
        return HeldoutWindows(
            jnp.asarray(windows.reshape(batches, rows, -1)),
            jnp.asarray(exists.reshape(batches, rows)),
            None if sizes is None else jnp.asarray(sizes),
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            ConfigError: a token of it has no row.
        """
        ids = self.corpus.tokenizer.encode(text)
        if ids and max(ids) >= self.vocab_size:
            raise ConfigError("data.vocab_size", self.vocab_size, f"above {max(ids)}, which the text holds")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return self.corpus.tokenizer.decode(map(int, ids))

    @property
    def perplexity(self) -> bool:
        """Whether perplexity means something for these tokens."""
        return self.corpus.tokenizer.perplexity

    @property
    def frequencies(self) -> Float[np.ndarray, "V"]:
        """Share of each token in the training text."""
        return self.corpus.counts_V / self.corpus.counts_V.sum()

    @property
    def token_strings(self) -> list[str]:
        """Each token as it is shown; see `tokenstring.visible`."""
        return self.corpus.tokenizer.strings

    @property
    def content(self) -> dict[str, Any]:
        """Sizes and hashes of the text and of the tokenizer; they go into config.json, since the files may change."""
        return self.corpus.content
