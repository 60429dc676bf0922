"""The stream of real text: windows of its tokens, read from the disk as they are needed."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from tied_lm.checks import ConfigError
from tied_lm.config import Data
from tied_lm.data.clusters import Clusters, clusters_of_windows
from tied_lm.data.corpus import Corpus, id_dtype, open_corpus
from tied_lm.data.documents import FIELD, Account
from tied_lm.data.stream import ONE_DEVICE, Batch, Devices

TOKENS_AHEAD = 2**20  # on the device for one dispatch, at most, unless one batch is more
HELDOUT_WINDOWS = 2**20  # of a larger held-out part so many, at even distances


@flax.struct.dataclass
class Windows:
    """The training windows of the steps from `first` on, W = L + 1 tokens each. K does not depend on how many a
    dispatch takes."""

    tokens: Integer[Array, "K B W"]
    fresh: Bool[Array, "K B"]
    first: Int[Array, ""]

    def batch(self, step: Int[Array, ""]) -> Batch:
        """The training batch of a step."""
        window, fresh = (
            jax.lax.dynamic_index_in_dim(a, step - self.first, keepdims=False) for a in (self.tokens, self.fresh)
        )
        return _batch(window, jnp.ones_like(fresh), fresh)


@flax.struct.dataclass
class HeldoutWindows:
    """The first held-out windows, W = L + 1 tokens each."""

    tokens: Integer[Array, "M B W"]
    exists: Bool[Array, "M B"]
    warm_up: Int[Array, "B L"] | None  # contiguous: what is before the first batch, and not scored
    sizes: Int[Array, "V"] | None  # bytes of each token
    law: ClassVar[None] = None  # unknown

    def heldout(self, index: int | Int[Array, ""]) -> Batch:
        """A held-out batch; past the last window it is masked."""
        exists = self.exists[index] & (index < self.exists.shape[0])
        return _batch(self.tokens[index], exists, jnp.full_like(exists, self.warm_up is None))

    def log_likelihood(self, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]) -> None:
        """Unknown for text."""
        return

    def byte_counts(self, targets: Int[Array, "*N"]) -> Int[Array, "*N"] | None:
        """Bytes of text that each token stands for; None if that is not known."""
        return None if self.sizes is None else self.sizes[targets]


def _batch(window: Integer[Array, "B W"], exists: Bool[Array, "B"], fresh: Bool[Array, "B"]) -> Batch:
    tokens = window.astype(jnp.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return Batch(inputs, targets, jnp.broadcast_to(exists[:, None], inputs.shape), fresh)


@dataclasses.dataclass(frozen=True)
class TextStream:
    """Windows of L + 1 tokens of a text. Training starts them anywhere, or (contiguous) where the last step ended.

    Contiguous: row b of a batch is a lane. The text is cut into windows that share their end tokens alone; lanes start
    at windows at even distances, and row b of the next step is the window after that of this one. Behind the last
    window a lane goes on with the first and its row is `fresh`, so that no window, and no state of a body, reaches
    across the end of the text. Fewer than L tokens lie outside the windows; the seed draws how many of them before.

    Held-out windows are disjoint; in a random order, or for contiguous ones in order in each lane. There the window
    before a lane's first one warms up the state of a body and is not scored (in the lane before it, it is).
    """

    corpus: Corpus
    data: Data
    seed: int

    entropy: ClassVar[None] = None  # unknown

    @classmethod
    def build(cls, data: Data, seed: int) -> "TextStream":
        corpus = open_corpus(data)
        for name, part in (("training", corpus.train), ("held-out", corpus.heldout)):
            warms_up = data.order == "contiguous" and part is corpus.heldout
            words, least = ("2 * data.length", 2 * data.length) if warms_up else ("data.length", data.length)
            if part.size < least + 1:
                raise ConfigError(
                    FIELD,
                    data.paths,
                    f"text whose {name} part has {words} + 1 = {least + 1} tokens; it has {part.size}",
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

    def _starts(self, step: int, updates: int) -> tuple[Int[np.ndarray, "updates B"], Bool[np.ndarray, "updates B"]]:
        """Where the windows of some steps begin in the training text, and which rows are fresh."""
        rows, length, size = self.data.batch_size, self.data.length, self.corpus.train.size
        if self.data.order == "contiguous":
            windows, outside = divmod(size - 1, length)
            first, before = self._draws(0, 2) * (windows, outside + 1)
            lanes = int(first) + np.arange(rows, dtype=np.int64) * windows // rows
            numbers = (lanes + np.arange(step, step + updates, dtype=np.int64)[:, None]) % windows
            return int(before) + numbers * length, numbers == 0
        blocks = -(-rows // 4)  # a position of the sequence holds four numbers
        draws = self._draws(step * blocks, updates * blocks * 4).reshape(updates, -1)[:, :rows]
        return (draws * (size - length)).astype(np.int64), np.ones(draws.shape, bool)

    def ahead(self, step: int, updates: int, devices: Devices = ONE_DEVICE) -> Windows:
        """What a dispatch of some updates needs, at most `most_updates`. A batch depends on seed and step alone.

        Args:
            devices: those on which it is to lie. Each of several processes reads the sequences of its own.
        """
        rows = self.data.batch_size
        own = devices.own_sequences(rows)
        tokens = np.zeros((self.most_updates, own.stop - own.start, self.data.length + 1), id_dtype(self.vocab_size))
        windows = tokens[:updates].reshape(-1, tokens.shape[-1])
        fresh = np.zeros(tokens.shape[:2], bool)
        starts, all_fresh = self._starts(step, updates)
        fresh[:updates] = all_fresh[:, own]
        self.corpus.train.read_windows(starts[:, own].ravel(), windows)
        return Windows(
            devices.from_own(tokens, 1, rows), devices.from_own(fresh, 1, rows), jnp.asarray(step, jnp.int32)
        )

    def _heldout_windows(self) -> Int[np.ndarray, "M B"]:
        """The numbers of the held-out windows in use, batch by batch; the last batch is filled up with -1."""
        windows, rows = (self.corpus.heldout.size - 1) // self.data.length, self.data.batch_size
        if self.data.order == "contiguous":
            # Lanes are equally long; the first begins behind a window that warms it up.
            lanes = min(rows, windows - 1)
            each = min(windows - 1, HELDOUT_WINDOWS) // lanes
            numbers = np.full((each, rows), -1)
            numbers[:, :lanes] = 1 + np.arange(lanes) * ((windows - 1) // lanes) + np.arange(each)[:, None]
            return numbers
        used = min(windows, HELDOUT_WINDOWS)
        numbers = np.full((-(-used // rows), rows), -1)
        # In random order any number of them is a fair sample.
        numbers.ravel()[:used] = np.random.default_rng(self.data.seed).permutation(np.arange(used) * windows // used)
        return numbers

    @functools.cached_property
    def heldout_tokens(self) -> int:
        """Target tokens in all held-out windows that are scored."""
        return int(np.sum(self._heldout_windows() >= 0)) * self.data.length

    def heldout_clusters(self, tokens: int) -> Clusters:
        """The clusters of the held-out sequences of so many tokens, filled up to whole batches."""
        rows, length = self.data.batch_size, self.data.length
        numbers_S = self._heldout_windows()[: -(-tokens // (rows * length))].ravel()
        used_S = (numbers_S >= 0) & (np.arange(numbers_S.size) * length < tokens)
        lanes = rows if self.data.order == "contiguous" else None
        return clusters_of_windows(numbers_S * length, used_S, self.corpus.heldout_ends, lanes)

    def heldout_ahead(self, tokens: int, devices: Devices = ONE_DEVICE) -> HeldoutWindows:
        """The held-out windows of the first so many target tokens, on the devices; the same for every seed."""
        rows, length = self.data.batch_size, self.data.length
        numbers = self._heldout_windows()[: -(-tokens // (rows * length)), devices.own_sequences(rows)]
        exists = numbers >= 0

        def read(numbers: Int[np.ndarray, "M B"]) -> Integer[np.ndarray, "M B W"]:
            windows = np.zeros((*numbers.shape, length + 1), id_dtype(self.vocab_size))
            found = windows[exists[: len(numbers)]]
            self.corpus.heldout.read_windows(numbers[exists[: len(numbers)]] * length, found)
            windows[exists[: len(numbers)]] = found
            return windows

        warm_up = read(numbers[:1] - 1)[0, :, :-1] if self.data.order == "contiguous" else None
        sizes = self.corpus.tokenizer.sizes
        return HeldoutWindows(
            devices.from_own(read(numbers), 1, rows),
            devices.from_own(exists, 1, rows),
            None if warm_up is None else devices.from_own(warm_up.astype(np.int32), 0, rows),
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

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "N"]) -> str:
        """The text of ids."""
        return self.corpus.tokenizer.decode(map(int, ids))

    @property
    def evaluated(self) -> tuple[str, ...]:
        """What an evaluation gives beside loss and tokens; see `records.Evaluation`."""
        return () if self.corpus.tokenizer.sizes is None else ("bytes",)

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

    @property
    def about(self) -> Account:
        """How the text is split; goes into summary.json."""
        return self.corpus.about
