"""The toy stream: tokens whose best possible loss is known."""

import dataclasses
import math
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from tied_lm.checks import ConfigError
from tied_lm.config import Data
from tied_lm.data.clusters import Clusters
from tied_lm.data.stream import ONE_DEVICE, Batch, Devices, named_key
from tied_lm.data.tokenizers import read_ids


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
    most_updates: ClassVar[float] = math.inf  # in one dispatch
    warm_up: ClassVar[None] = None  # no sequence goes on in the next batch
    perplexity: ClassVar[bool] = False  # whether it means something for these tokens
    evaluated: ClassVar[tuple[str, ...]] = ("excess", "law")  # of `records.Evaluation`, beside loss and tokens

    KAPPA: ClassVar[float] = 3.0

    @classmethod
    def build(cls, data: Data, seed: int) -> "ToyStream":
        if data.classes > data.vocab_size:
            raise ConfigError("data.classes", data.classes, f"at most data.vocab_size = {data.vocab_size}")
        if data.order != "random":
            raise ConfigError("data.order", data.order, "random, unless data.source = 'text'")
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

    def ahead(self, step: int, updates: int, devices: Devices = ONE_DEVICE) -> "ToyStream":
        """What a dispatch of some updates needs: nothing else, since batches are made on the devices."""
        return self

    def heldout_ahead(self, tokens: int, devices: Devices = ONE_DEVICE) -> "ToyStream":
        """What an evaluation of so many tokens needs."""
        return self

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
        every = jnp.ones((self.batch_size, self.length), bool)
        return Batch(tokens[:, :-1], tokens[:, 1:], every, every[:, 0])

    def batch(self, step: int | Int[Array, ""]) -> Batch:
        """The training batch of a step."""
        return self._sample(jax.random.fold_in(self.key, step))

    def heldout(self, index: int | Int[Array, ""]) -> Batch:
        """A held-out batch: the same for every arm, seed and evaluation."""
        return self._sample(jax.random.fold_in(self.heldout_key, index))

    def heldout_clusters(self, tokens: int) -> Clusters:
        """The held-out sequences of so many tokens, filled up to whole batches; each is drawn on its own."""
        batches = -(-tokens // (self.batch_size * self.length))
        return Clusters("sequence", np.arange(batches * self.batch_size))

    @property
    def law(self) -> "ToyStream":
        """What is known of the distribution of the tokens."""
        return self

    def _class_means(self, values: Float[Array, "*C V"], first: int | Int[Array, ""]) -> Float[Array, "*C K"]:
        """The mean of values within each class, weighed by the law; or their part of it, if they are those of the
        tokens from `first` on."""
        k, v = self.increments_K.size, values.shape[-1]
        ranks = -(-v // k)
        ids = first + jnp.arange(v)
        weight_V = jnp.exp(-self.exponent * jnp.log1p((ids // k).astype(jnp.float32)))
        weight_V /= self.cumulative_R[jnp.asarray(self._class_sizes())[ids % k] - 1]
        is_all = isinstance(first, int) and v == self.vocab_size
        weighed = values * (weight_V if is_all else jnp.where(ids < self.vocab_size, weight_V, 0))
        weighed = jnp.pad(weighed, [(0, 0)] * (values.ndim - 1) + [(0, ranks * k - v)])
        sums = weighed.reshape(*values.shape[:-1], ranks, k).sum(axis=-2)
        return sums if is_all else jnp.roll(sums, first % k, axis=-1)

    def _transition(self, classes_C: Int[Array, "*C"]) -> Float[Array, "*C K"]:
        """The probability of each next class."""
        k = self.increments_K.size
        return self.increments_K[(jnp.arange(k) - classes_C[..., None]) % k]

    def expected(
        self, values_CxV: Float[Array, "C V"], contexts_C: Int[Array, "C"], first: int | Int[Array, ""] = 0
    ) -> Float[Array, "C"]:
        """The mean of values over the next token; see `likelihoods.Law`."""
        return (self._class_means(values_CxV, first) * self._transition(contexts_C)).sum(axis=1)

    def _by_class(self, values_KxD: Float[Array, "K D"]) -> Float[Array, "K D"]:
        """For each class, the mean of values over the next one. T, K x K, is not held."""
        k = self.increments_K.size
        product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.map(lambda c: product(self._transition(c), values_KxD), jnp.arange(k), batch_size=min(k, 256))

    def expected_rows(
        self, rows_VxD: Float[Array, "V D"], contexts_N: Int[Array, "N"], first: int | Int[Array, ""] = 0
    ) -> Float[Array, "N D"]:
        """The mean of rows over the next token; see `likelihoods.Law`."""
        return self._by_class(self._class_means(rows_VxD.T, first).T)[contexts_N % self.increments_K.size]

    def next_entropy(self, contexts_N: Int[Array, "N"]) -> Float[Array, "N"]:
        """Entropy of the next token, nats; see `likelihoods.Law`. Classes of another size have another one within."""
        q_K = self.increments_K
        within_K = self._by_class(jnp.asarray(self._entropies_within()[:, None], jnp.float32))[:, 0]
        return (within_K - jnp.sum(q_K * jnp.log(q_K)))[contexts_N % q_K.size]

    def log_likelihood(self, inputs: Int[Array, "*#N"], targets: Int[Array, "*#N"]) -> Float[Array, "..."]:
        """log p(target | input) under the law itself, nats."""
        k = self.increments_K.size
        next_class, rank = targets % k, targets // k
        total = self.cumulative_R[jnp.asarray(self._class_sizes())[next_class] - 1]
        weight = -self.exponent * jnp.log1p(rank.astype(jnp.float32))
        return jnp.log(self.increments_K[(next_class - inputs) % k]) + weight - jnp.log(total)

    def byte_counts(self, targets: Int[Array, "*N"]) -> None:
        """These tokens stand for no text."""
        return

    def _entropies_within(self) -> Float[np.ndarray, "K"]:
        """Entropy of the rank in each class, nats."""
        sizes = self._class_sizes()
        entropies_K = np.zeros(sizes.size)
        for size in np.unique(sizes):
            p = np.arange(1.0, size + 1) ** -self.exponent
            p /= p.sum()
            entropies_K[sizes == size] = -np.sum(p * np.log(p))
        return entropies_K

    @property
    def entropy(self) -> float:
        """Entropy rate, nats a token: that of the class increment plus the mean over classes of that of the rank."""
        q = np.asarray(self.increments_K, np.float64)
        return float(-np.sum(q * np.log(q / q.sum())) / q.sum() + np.mean(self._entropies_within()))

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
        return read_ids(text, self.vocab_size)

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "N"]) -> str:
        """Ids as decimal numbers, with spaces between them."""
        return " ".join(str(int(i)) for i in ids)

    @property
    def token_strings(self) -> list[str]:
        return [str(i) for i in range(self.vocab_size)]

    @property
    def content(self) -> dict[str, Any]:
        """What the config does not say of the tokens; goes into config.json."""
        return {}

    @property
    def about(self) -> None:
        """There is no text."""
        return
