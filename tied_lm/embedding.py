"""Which array looks up, and which scores."""

from typing import ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tied_lm.config import Config, own_options


class VocabularyModel(nn.Module):
    """What the tying schemes share: from ids to hidden vectors, and from those to scores.

    A scheme says in `matrices` which arrays look up and score, and in `vocabulary` how its parameters of shape
    (V, D) are called: the one that looks up first, the one that scores last.
    """

    vocab_size: int
    features: int
    body: nn.Module | None = None
    compute_dtype: DTypeLike = jnp.float32  # of the operands of the large products; parameters and sums are float32
    init_std: float = 0.02  # of the initial entries of the vocabulary matrices
    scale_input: bool = False  # multiply what is looked up by sqrt(D)

    vocabulary: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, config: Config, body: nn.Module | None) -> Self:
        """The model that a config describes; a scheme takes its own fields from the group `scheme`, by name."""
        m = config.model
        own = own_options(cls, VocabularyModel, config.scheme, "scheme")
        dtype = jnp.dtype(m.compute_dtype)
        return cls(config.data.vocab_size, m.features, body, dtype, m.init_std, m.scale_input, **own)

    def matrices(self) -> tuple[Float[Array, "V D"], Float[Array, "V D"]]:
        """The array that looks up and the array that scores."""
        raise NotImplementedError

    @nn.compact
    def hidden(
        self, ids: Int[Array, "*N"], *, offset: Float[Array, "*N D"] | None = None, train: bool = False
    ) -> tuple[Float[Array, "*N D"], Float[Array, "V D"]]:
        """Hidden vectors, and the matrix whose rows score them.

        Args:
            ids: token ids in [0, V); not checked here, since values are unknown under jit (out of range they clamp).
            offset: added to the looked-up vectors; the gradient in zeros given here is dL/dx at each position.
            train: passed on to the body.
        """
        lookup_VxD, scoring_VxD = self.matrices()
        x = lookup_VxD[ids]
        if self.scale_input:
            x = x * self.features**0.5
        if offset is not None:
            x = x + offset
        return (x if self.body is None else self.body(x, train=train)), scoring_VxD

    def __call__(self, ids: Int[Array, "*N"], *, train: bool = False) -> Float[Array, "*N V"]:
        """Raw scores of every vocabulary row: no softmax, no bias, no scale."""
        h, scoring_VxD = (x.astype(self.compute_dtype) for x in self.hidden(ids, train=train))
        return jnp.matmul(h, scoring_VxD.T, preferred_element_type=jnp.float32)


class TiedEmbedding(VocabularyModel):
    """One matrix W (V, D) for both uses: x = W[ids], logits = h @ W.T, and h = x without a body.

    The only vocabulary parameter is `embedding`, drawn from a normal distribution with standard deviation 0.02.
    (The default of `nn.Embed` is another one: standard deviation 1/sqrt(D).)

    >>> import jax, jax.numpy as jnp
    >>> model = TiedEmbedding(vocab_size=3, features=2)
    >>> W = jnp.array([[1., 0.], [2., 0.], [0., 1.]])
    >>> logits = model.apply({"params": {"embedding": W}}, jnp.array([0, 2, 0]))
    >>> logits.tolist()  # token 0 scores row 1 higher than itself; equal ids give equal rows
    [[1.0, 2.0, 0.0], [0.0, 0.0, 1.0], [1.0, 2.0, 0.0]]
    >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0), jnp.array([0])))
    {'params': {'embedding': (3, 2)}}
    """

    vocabulary: ClassVar[tuple[str, ...]] = ("embedding",)

    def matrices(self) -> tuple[Float[Array, "V D"], Float[Array, "V D"]]:
        embedding_VxD = self.param(
            "embedding", nn.initializers.normal(stddev=self.init_std), (self.vocab_size, self.features)
        )
        return embedding_VxD, embedding_VxD


class UntiedEmbedding(VocabularyModel):
    """The baseline: `embedding` looks up and `output` scores, from the same distribution with separate keys.

    `embedding` is declared first, so from one key it starts as that of `TiedEmbedding` does. With `same_start` both
    matrices start from the same values; that does not tie them, and they part with the first update.
    """

    same_start: bool = False

    vocabulary: ClassVar[tuple[str, ...]] = ("embedding", "output")

    def matrices(self) -> tuple[Float[Array, "V D"], Float[Array, "V D"]]:
        shape = (self.vocab_size, self.features)
        embedding_VxD = self.param("embedding", nn.initializers.normal(stddev=self.init_std), shape)
        if self.same_start:
            return embedding_VxD, self.param("output", lambda key: embedding_VxD + 0.0)
        return embedding_VxD, self.param("output", nn.initializers.normal(stddev=self.init_std), shape)


SCHEMES: dict[str, type[VocabularyModel]] = {"tied": TiedEmbedding, "untied": UntiedEmbedding}


def count_parameters(model: VocabularyModel) -> dict[str, int]:
    """Numbers of parameters: `vocabulary` (each matrix once), `body`, `total`; and `saved`, what tying spares
    of the two matrices of an untied model. Nothing is allocated.

    >>> count_parameters(TiedEmbedding(vocab_size=50_000, features=4096))["saved"]
    204800000
    """
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    vocabulary = sum(params[name].size for name in model.vocabulary)
    saved = (2 - len(model.vocabulary)) * model.vocab_size * model.features
    return {"vocabulary": vocabulary, "body": total - vocabulary, "total": total, "saved": saved}
