"""Which array looks up, and which scores: what every tying scheme shares, the tied module, the untied baseline."""

from typing import Annotated, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from tied_lm.checks import at_least, check_fields
from tied_lm.model.loss import VocabularyLoss

Params = dict[str, Array]


class Transition(NamedTuple):
    """A change of the model during training, made before anything else happens at its step."""

    step: int
    model: "VocabularyModel"
    copies: dict[str, str]  # new parameter -> the one whose values and optimizer moments it starts with


class VocabularyModel(nn.Module):
    """What the tying schemes share: from ids to hidden vectors, and from those to scores.

    A scheme says what is learned (`declare`), what a looked-up row becomes (`look_up`), and which matrix scores what
    (`score`). Its primary parameter is `embedding`, which looks up; the split is kept in its rows: *lookup* is the
    gradient of its use in `look_up`, *scoring* that of its use in `score` (of `output` where that scores), and *total*
    their sum, which is what a tied matrix receives.

    A scheme's own fields are its options, taken from the config's group `scheme` by their names.
    """

    vocab_size: Annotated[int, at_least(1)]
    features: Annotated[int, at_least(1)]
    body: nn.Module | None = None
    compute_dtype: DTypeLike = jnp.float32  # of the operands of the large products; parameters and sums are float32
    init_std: float = 0.02  # of the initial entries of the vocabulary matrices
    scale_input: bool = False  # multiply what is looked up by sqrt(D)
    bands: tuple[int, ...] = ()  # band of each row by frequency, for schemes that treat rare rows apart

    tied: ClassVar[bool] = True  # one matrix looks up and scores
    vocabulary: ClassVar[tuple[str, ...]] = ("embedding",)  # parameters with a row for each token
    others: ClassVar[tuple[str, ...]] = ()  # parameters beside the matrices that look up and score
    push_parts: ClassVar[tuple[str, ...]] = ()  # parts of the push that are recorded by themselves
    no_sum_rule: ClassVar[str] = ""  # why the rows of `scoring` do not sum to 0, if they do not

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()

    def check(self) -> None:
        """Refuse fields that do not go together.

        Raises:
            ConfigError: it names the field as the config does.
        """

    @property
    def scoring_vocabulary(self) -> tuple[str, ...]:
        """Of the parameters with a row for each token, those that score."""
        return tuple(name for name in self.vocabulary if self.tied or name != "embedding")

    @property
    def row_width(self) -> int:
        """Width of the vocabulary matrices."""
        return self.features

    @property
    def logit_cap(self) -> float | None:
        """c, where logits are c tanh(z / c) of the products z."""
        return None

    @property
    def input_scale(self) -> float:
        """What looked-up vectors are multiplied by."""
        return self.features**0.5 if self.scale_input else 1.0

    def matrix(self, name: str, rows: int, width: int) -> Float[Array, "R D"]:
        """A learned matrix that starts as the vocabulary matrices do."""
        return self.param(name, nn.initializers.normal(stddev=self.init_std), (rows, width))

    def declare(self) -> Params:
        """What is learned, `embedding` first, so that every scheme starts from the same one."""
        return {"embedding": self.matrix("embedding", self.vocab_size, self.row_width)}

    def look_up(self, rows: Float[Array, "*N R"], p: Params) -> Float[Array, "*N D"]:
        """Looked-up vectors from rows of `embedding`."""
        return rows

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N R"], Float[Array, "V R"]]:
        """What is scored, and the matrix whose rows score it. The matrix may add to a vocabulary matrix, not scale it,
        so that the gradient in the one is that in the other."""
        return h, p["embedding"]

    def penalty(self, p: Params) -> Float[Array, ""] | None:
        """What is added to the loss, nats."""
        return None

    def weigh(
        self, loss: VocabularyLoss, h_NxR: Float[Array, "N R"], targets_N: Int[Array, "N"]
    ) -> tuple[VocabularyLoss, dict[str, Float[Array, "V R"]]]:
        """The loss with its gradient in the scoring matrix as the matrix shall receive it; and parts of `push` to be
        recorded by themselves."""
        return loss, {}

    def marks(self, targets_N: Int[Array, "N"]) -> Float[Array, "N"] | None:
        """1 for tokens whose share of `expected` is wanted apart, else 0."""
        return None

    def transition(self) -> Transition | None:
        """The next change of the model, if there is one."""
        return None

    @nn.compact
    def hidden(
        self,
        ids: Int[Array, "*N"],
        *,
        offset: Float[Array, "*N R"] | None = None,
        others: tuple[Params, Params] | None = None,
        train: bool = False,
    ) -> tuple[Float[Array, "*N R"], Float[Array, "V R"]]:
        """Hidden vectors as they are scored, and the matrix whose rows score them.

        Args:
            ids: token ids in [0, V); not checked here, since values are unknown under jit (out of range they clamp).
            offset: added to the looked-up rows; the gradient in zeros given here is what each position asks of its row.
            others: likewise added to the scheme's `others`, in the lookup and in the scoring.
            train: passed on to the body.
        """
        p = self.declare()
        at_lookup, at_scoring = others or ({}, {})
        rows = p["embedding"][ids]
        if offset is not None:
            rows = rows + offset
        x = self.look_up(rows, p | {name: p[name] + zeros for name, zeros in at_lookup.items()})
        if self.input_scale != 1:
            x = x * self.input_scale
        h = x if self.body is None else self.body(x, train=train)
        return self.score(h, p | {name: p[name] + zeros for name, zeros in at_scoring.items()})

    def __call__(self, ids: Int[Array, "*N"], *, train: bool = False) -> Float[Array, "*N V"]:
        """Scores of every vocabulary row: no softmax, no bias."""
        return self.logits(*self.hidden(ids, train=train))

    def logits(self, h: Float[Array, "*N R"], scoring_VxR: Float[Array, "V R"]) -> Float[Array, "*N V"]:
        """Scores of every vocabulary row, from what `hidden` gives."""
        h, scoring_VxR = h.astype(self.compute_dtype), scoring_VxR.astype(self.compute_dtype)
        logits = jnp.matmul(h, scoring_VxR.T, preferred_element_type=jnp.float32)
        return logits if self.logit_cap is None else self.logit_cap * jnp.tanh(logits / self.logit_cap)


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


class UntiedEmbedding(VocabularyModel):
    """The baseline: `embedding` looks up and `output` scores, from the same distribution with separate keys.

    `embedding` is declared first, so from one key it starts as that of `TiedEmbedding` does. With `same_start` both
    matrices start from the same values; that does not tie them, and they part with the first update. `total` is
    hypothetical here: lookup and scoring are gradients of two matrices.
    """

    same_start: bool = False

    tied: ClassVar[bool] = False
    vocabulary: ClassVar[tuple[str, ...]] = ("embedding", "output")

    def declare(self) -> Params:
        p = super().declare()
        if self.same_start:
            return p | {"output": self.param("output", lambda key: p["embedding"] + 0.0)}
        return p | {"output": self.matrix("output", self.vocab_size, self.row_width)}

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N R"], Float[Array, "V R"]]:
        return h, p["output"]


def count_parameters(model: VocabularyModel) -> dict[str, int]:
    """Numbers of parameters: `vocabulary` (all that the scheme learns, each matrix once), `body`, `total`; and
    `saved`, what the scheme spares of the two matrices of an untied model. Nothing is allocated.

    >>> count_parameters(TiedEmbedding(vocab_size=50_000, features=4096))["saved"]
    204800000
    """
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params: PyTree = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    body = sum(leaf.size for leaf in jax.tree.leaves(params.get("body", {})))
    saved = 2 * model.vocab_size * model.features - (total - body)
    return {"vocabulary": total - body, "body": body, "total": total, "saved": saved}
