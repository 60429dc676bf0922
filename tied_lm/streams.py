"""Where tokens come from. A stream is a pure function: a batch depends on the seed and the step alone."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tied_lm.config import ConfigError, Data
from tied_lm.text import FIELD, read_split


class Batch(NamedTuple):
    inputs: Int[Array, "B L"]
    targets: Int[Array, "B L"]
    mask: Bool[Array, "B L"]  # False where a held-out batch is filled up


def named_key(seed: int | Int[Array, ""], name: str) -> Array:
    """A random key for one purpose. The name is hashed, so no two purposes share numbers, whatever their order."""
    tag = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return jax.random.fold_in(jax.random.key(jnp.asarray(seed, jnp.uint32)), tag)


@flax.struct.dataclass
class ToyStream:
    """A Markov chain over V tokens in K classes whose entropy rate is known.

    class = id % K, rank = id // K. The next class given the last has probability
    T[c, c'] proportional to exp(3 cos(2 pi (c' - c - s) / K)), s = (1 - reversibility) K / 4; within its class a
    token has probability proportional to (rank + 1)^-exponent. Hence the class increments are independent, so that
    sampling is a cumulative sum, and the stationary law is uniform over classes times Zipf within. No array is
    larger than V.
    """

    key: Array  # of the training batches
    heldout_key: Array
    increments_K: Float[Array, "K"]  # probability of each class increment
    cumulative_R: Float[Array, "R"]  # cumulative Zipf weights by rank
    batch_size: int = flax.struct.field(pytree_node=False)
    length: int = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)
    exponent: float = flax.struct.field(pytree_node=False)
    heldout_tokens: ClassVar[float] = math.inf  # as many as are asked for

    KAPPA: ClassVar[float] = 3.0

    @classmethod
    def build(cls, data: Data, seed: int) -> "ToyStream":
        if data.classes > data.vocab_size:
            raise ConfigError("data.classes", data.classes, f"at most data.vocab_size = {data.vocab_size}")
        k = np.arange(data.classes)
        shift = (1 - data.reversibility) * data.classes / 4
        weights = np.exp(cls.KAPPA * (np.cos(2 * np.pi * (k - shift) / data.classes) - 1))
        ranks = np.arange(-(-data.vocab_size // data.classes))
        return cls(
            key=named_key(seed, "batches"),
            heldout_key=named_key(data.seed, "heldout"),
            increments_K=jnp.asarray(weights / weights.sum(), jnp.float32),
            cumulative_R=jnp.asarray(np.cumsum((ranks + 1.0) ** -data.zipf_exponent), jnp.float32),
            batch_size=data.batch_size,
            length=data.length,
            vocab_size=data.vocab_size,
            exponent=data.zipf_exponent,
        )

    def with_seed(self, seed: int) -> "ToyStream":
        """The same tokens in the order of another seed."""
        return dataclasses.replace(self, key=named_key(seed, "batches"))

    def _class_sizes(self) -> Int[np.ndarray, "K"]:
        """Tokens in each class; when K does not divide V, the first classes hold one more."""
        k = self.increments_K.size
        return (self.vocab_size - np.arange(k) + k - 1) // k

    def _sample(self, key: Array) -> Batch:
        class_key, rank_key = jax.random.split(key)
        k, shape = self.increments_K.size, (self.batch_size, self.length + 1)
        u = jax.random.uniform(class_key, shape)
        first = jnp.minimum((u[:, :1] * k).astype(jnp.int32), k - 1)
        cumulative_K = jnp.cumsum(self.increments_K)
        steps = jnp.searchsorted(cumulative_K, u[:, 1:] * cumulative_K[-1], side="right").astype(jnp.int32)
        classes = jnp.cumsum(jnp.concatenate([first, jnp.minimum(steps, k - 1)], axis=1), axis=1) % k
        size = jnp.asarray(self._class_sizes())[classes]
        v = jax.random.uniform(rank_key, shape) * self.cumulative_R[size - 1]
        rank = jnp.minimum(jnp.searchsorted(self.cumulative_R, v, side="right").astype(jnp.int32), size - 1)
        tokens = rank * k + classes
        return Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((self.batch_size, self.length), bool))

    def batch(self, step: int | Int[Array, ""]) -> Batch:
        """The training batch of a step."""
        return self._sample(jax.random.fold_in(self.key, step))

    def heldout(self, index: int | Int[Array, ""]) -> Batch:
        """A held-out batch: the same for every arm, seed and evaluation."""
        return self._sample(jax.random.fold_in(self.heldout_key, index))

    def log_likelihood(self, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]) -> Float[Array, "*N"]:
        """log p(target | input) under the law itself, nats."""
        k = self.increments_K.size
        next_class, rank = targets % k, targets // k
        total = self.cumulative_R[jnp.asarray(self._class_sizes())[next_class] - 1]
        weight = -self.exponent * jnp.log1p(rank.astype(jnp.float32))
        return jnp.log(self.increments_K[(next_class - inputs) % k]) + weight - jnp.log(total)

    @property
    def entropy(self) -> float:
        """Entropy rate, nats a token: that of the class increment plus the mean over classes of that of the rank."""
        q = np.asarray(self.increments_K, np.float64)
        sizes = self._class_sizes()
        within = 0.0
        for size in np.unique(sizes):
            p = np.arange(1.0, size + 1) ** -self.exponent
            p /= p.sum()
            within += np.mean(sizes == size) * -np.sum(p * np.log(p))
        return float(-np.sum(q * np.log(q / q.sum())) / q.sum() + within)

    @property
    def frequencies(self) -> Float[np.ndarray, "V"]:
        """Stationary probability of each token."""
        k = self.increments_K.size
        ids = np.arange(self.vocab_size)
        weights = (ids // k + 1.0) ** -self.exponent
        totals = np.bincount(ids % k, weights)
        return weights / totals[ids % k] / k

    def encode(self, text: str) -> list[int]:
        """The ids that a text writes as decimal numbers, with spaces between them."""
        words = text.split()
        if not all(word.isascii() and word.isdecimal() and int(word) < self.vocab_size for word in words):
            raise ConfigError("text", text, f"ids from 0 to {self.vocab_size - 1}, with spaces between them")
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids as decimal numbers, with spaces between them."""
        return " ".join(str(int(i)) for i in ids)

    @property
    def token_strings(self) -> list[str]:
        return [str(i) for i in range(self.vocab_size)]

    @property
    def content(self) -> dict[str, Any]:
        """What the config does not say of the tokens; goes into config.json."""
        return {}


@flax.struct.dataclass
class TextStream:
    """Bytes of real text as tokens: windows of L + 1 bytes at random starts; the held-out windows are disjoint."""

    key: Array
    train_bytes: Int[Array, "T"]
    heldout_bytes: Int[Array, "H"]
    window_order: Int[Array, "W"]  # the held-out windows in random order, so that any number is a fair sample
    batch_size: int = flax.struct.field(pytree_node=False)
    length: int = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)

    entropy: ClassVar[None] = None  # unknown

    @classmethod
    def build(cls, data: Data, seed: int) -> "TextStream":
        split = read_split(data.paths, data.heldout_fraction, data.seed)
        for name, part in (("training", split.train), ("held-out", split.heldout)):
            if part.size < data.length + 1:
                raise ConfigError(
                    FIELD,
                    data.paths,
                    f"text whose {name} part has data.length + 1 = {data.length + 1} bytes; it has {part.size}",
                )
        largest = int(max(split.train.max(), split.heldout.max()))
        if largest >= data.vocab_size:
            raise ConfigError("data.vocab_size", data.vocab_size, f"above {largest}, the largest byte of the text")
        windows = (split.heldout.size - 1) // data.length
        return cls(
            key=named_key(seed, "batches"),
            train_bytes=jnp.asarray(split.train),
            heldout_bytes=jnp.asarray(split.heldout),
            window_order=jnp.asarray(np.random.default_rng(data.seed).permutation(windows), jnp.int32),
            batch_size=data.batch_size,
            length=data.length,
            vocab_size=data.vocab_size,
        )

    def with_seed(self, seed: int) -> "TextStream":
        """The same text in the order of another seed."""
        return dataclasses.replace(self, key=named_key(seed, "batches"))

    @property
    def heldout_tokens(self) -> int:
        """Target tokens in all held-out windows."""
        return self.window_order.size * self.length

    def _windows(self, text: Array, starts: Int[Array, "B"], mask: Bool[Array, "B"]) -> Batch:
        tokens = text[starts[:, None] + jnp.arange(self.length + 1)].astype(jnp.int32)
        return Batch(tokens[:, :-1], tokens[:, 1:], jnp.broadcast_to(mask[:, None], (self.batch_size, self.length)))

    def batch(self, step: int | Int[Array, ""]) -> Batch:
        """The training batch of a step."""
        last = self.train_bytes.size - self.length
        starts = jax.random.randint(jax.random.fold_in(self.key, step), (self.batch_size,), 0, last)
        return self._windows(self.train_bytes, starts, jnp.ones(self.batch_size, bool))

    def heldout(self, index: int | Int[Array, ""]) -> Batch:
        """A held-out batch; past the last window it is masked."""
        windows = index * self.batch_size + jnp.arange(self.batch_size)
        exists = windows < self.window_order.size
        starts = self.window_order[jnp.where(exists, windows, 0)] * self.length
        return self._windows(self.heldout_bytes, starts, exists)

    def log_likelihood(self, inputs: Int[Array, "*N"], targets: Int[Array, "*N"]) -> None:
        """Unknown for text."""
        return

    @property
    def frequencies(self) -> Float[np.ndarray, "V"]:
        """Share of each byte in the training text."""
        counts = np.bincount(np.asarray(self.train_bytes), minlength=self.vocab_size)
        return counts / counts.sum()

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes; what is no UTF-8 becomes a replacement character."""
        return bytes(ids).decode(errors="replace")

    @property
    def token_strings(self) -> list[str]:
        """Printable ASCII as it is, every other byte as <0x..>."""
        return [chr(i) if 32 < i < 127 else f"<0x{i:02X}>" for i in range(self.vocab_size)]

    @property
    def content(self) -> dict[str, Any]:
        """Sizes and hashes of the text; they go into config.json, since the files may change."""
        parts = {"train": self.train_bytes, "heldout": self.heldout_bytes}
        return {
            f"text_{name}": {"bytes": part.size, "sha256": hashlib.sha256(np.asarray(part).tobytes()).hexdigest()}
            for name, part in parts.items()
        }


Stream = ToyStream | TextStream

STREAMS: dict[str, type[ToyStream] | type[TextStream]] = {"toy": ToyStream, "text": TextStream}
