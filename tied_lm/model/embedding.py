"""Which array looks up, and which scores: what every tying scheme shares, the tied module, the untied baseline."""

from typing import Annotated, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from tied_lm.checks import at_least, check_fields
from tied_lm.model.mesh import Layout

Params = dict[str, PyTree]
Step = int | Int[Array, ""]  # the number of updates so far


class ScoringGradient(NamedTuple):
    """The gradient of the matrix that scores, and what its parts are made of; `vocabulary_loss` has the formulas."""

    table: Float[Array, "V R"]  # expected - data
    expected: Float[Array, "V R"]
    h: Float[Array, "N R"]
    targets: Int[Array, "N"]
    data_weight: Float[Array, "N"]  # data[v] sums data_weight_t h_t over the t with y_t = v
    own_weight: Float[Array, "N"]  # and own[v] own_weight_t h_t
    expected_parts: Float[Array, "2 V R"] | None  # of the tokens that the scheme marks, and of the others
    push_parts: Params  # parts of `push` that are recorded by themselves

    def at_targets(self, weight_N: Float[Array, "N"]) -> Float[Array, "V R"]:
        """Weighted hidden vectors, summed into the rows of their targets."""
        return jnp.zeros_like(self.expected).at[self.targets].add(weight_N[:, None] * self.h)

    def weighed(self, weight: float) -> "ScoringGradient":
        """All of it times a number; with 0 it is not even computed."""
        return self._replace(
            table=weigh(weight, self.table),
            expected=weigh(weight, self.expected),
            data_weight=weigh(weight, self.data_weight),
            own_weight=weigh(weight, self.own_weight),
        )


def weigh(weight: float, gradient: Array) -> Array:
    """A gradient times a number; 0 times what is not finite is 0."""
    return weight * gradient if weight else jnp.zeros_like(gradient)


class VocabularyModel(nn.Module):
    """What the tying schemes share: from ids to hidden vectors, and from those to scores.

    A scheme says what is learned (`declare`), what a looked-up row becomes (`look_up`), and which matrix scores what
    (`score`). Its primary parameter is `embedding`, which looks up; the split is kept in its rows: *lookup* is the
    gradient of its use in `look_up`, *scoring* that of its use in `score` (of `output` where that scores), and *total*
    their sum, which is what a tied matrix receives. These are the gradients of the loss, unless the scheme weighs,
    stops or gates one of them (`receive`).

    A scheme's own fields are its options, taken from the config's group `scheme` by their names.
    """

    vocab_size: Annotated[int, at_least(1)]
    features: Annotated[int, at_least(1)]
    body: nn.Module | None = None
    compute_dtype: DTypeLike = jnp.float32  # of the operands of the large products; parameters and sums are float32
    init_std: float = 0.02  # of the initial entries of the vocabulary matrices
    scale_input: bool = False  # multiply what is looked up by sqrt(D)
    bands: tuple[int, ...] = ()  # band of each row by frequency, for schemes that treat rare rows apart
    block_tokens: int = 0  # see `vocabulary_loss`
    mesh: Mesh | None = None  # devices on which rows and tokens lie; None for one

    scorer: ClassVar[str] = "embedding"  # the parameter whose rows score
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
        return tuple(name for name in self.vocabulary if name != "embedding" or self.scorer == "embedding")

    @property
    def untied_from(self) -> int | None:
        """The step from which lookup and scoring have a matrix each; None if there is none."""
        return None if self.scorer == "embedding" else 0

    def tied_at(self, step: Step) -> bool | Bool[Array, ""]:
        """Whether one matrix looks up and scores after so many updates."""
        since = self.untied_from
        return since is None or (since > 0 and step < since)

    @property
    def row_width(self) -> int:
        """Width of the vocabulary matrices."""
        return self.features

    @property
    def layout(self) -> Layout:
        """Of rows and tokens over devices. The matrices have `layout.rows` rows, of which the last may be padding."""
        return Layout(self.mesh, self.vocab_size)

    @property
    def logit_cap(self) -> float | None:
        """c, where logits are c tanh(z / c) of the products z."""
        return None

    @property
    def input_scale(self) -> float:
        """What looked-up vectors are multiplied by."""
        return self.features**0.5 if self.scale_input else 1.0

    def matrix(self, name: str) -> Float[Array, "V R"]:
        """A vocabulary matrix. The values at the start are the same on any mesh."""
        start = nn.initializers.normal(stddev=self.init_std)
        return self.param(name, lambda key: self.layout.padded(start(key, (self.vocab_size, self.row_width))))

    def declare(self) -> Params:
        """What is learned, `embedding` first, so that every scheme starts from the same one."""
        return {"embedding": self.matrix("embedding")}

    def look_up(self, rows: Float[Array, "*N R"], p: Params) -> Float[Array, "*N D"]:
        """Looked-up vectors from rows of `embedding`."""
        return rows

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N R"], Float[Array, "V R"]]:
        """What is scored, and the matrix whose rows score it. The matrix may add to a vocabulary matrix, not scale it,
        so that the gradient in the one is that in the other."""
        return h, p[self.scorer]

    def penalty(self, p: Params) -> Float[Array, ""] | None:
        """What is added to the loss, nats."""
        return None

    def receive(
        self, lookup_NxR: Float[Array, "N R"], scoring: ScoringGradient
    ) -> tuple[Float[Array, "N R"], ScoringGradient]:
        """The gradients by use as the vocabulary matrix receives them, and as they are recorded.

        Args:
            lookup_NxR: what each position asks of the row that it looked up.
            scoring: what the scores ask of all rows.
        """
        return lookup_NxR, scoring

    def marks(self, targets_N: Int[Array, "N"]) -> Float[Array, "N"] | None:
        """1 for tokens whose share of `expected` is wanted apart in `receive`, else 0."""
        return None

    def add_lookup(
        self, gradients: Params, ids_N: Int[Array, "N"], lookup_NxR: Float[Array, "N R"], step: Step
    ) -> Params:
        """The gradients with what the lookup asks added to the rows of the matrix that it moves at a step."""
        return gradients | {"embedding": gradients["embedding"].at[ids_N].add(lookup_NxR)}

    def share(self, tree: PyTree, step: Step) -> PyTree:
        """The parameters, their changes and the optimizer's moments after the update of a step, as they are kept:
        matrices that are still one have the same."""
        return tree

    @nn.compact
    def hidden(
        self,
        ids: Int[Array, "*N"],
        *,
        rows: Float[Array, "*N R"] | None = None,
        at_scoring: Params | None = None,
        train: bool = False,
    ) -> tuple[Float[Array, "*N R"], Float[Array, "V R"]]:
        """Hidden vectors as they are scored, and the matrix whose rows score them.

        Args:
            ids: token ids in [0, V); not checked here, since values are unknown under jit (out of range they clamp).
            rows: the rows of `embedding` that the ids select, where they are at hand: a gradient in them is what each
                position asks of its row.
            at_scoring: the scheme's parameters for the scoring, so that each use can have a gradient of its own.
            train: passed on to the body.
        """
        p = self.declare()
        x = self.look_up(p["embedding"][ids] if rows is None else rows, p)
        if self.input_scale != 1:
            x = x * self.input_scale
        h = x if self.body is None else self.body(x, train=train)
        return self.score(h, p if at_scoring is None else at_scoring)

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

    scorer: ClassVar[str] = "output"
    vocabulary: ClassVar[tuple[str, ...]] = ("embedding", "output")

    def declare(self) -> Params:
        p = super().declare()
        if self.same_start:
            return p | {"output": self.param("output", lambda key: p["embedding"] + 0.0)}
        return p | {"output": self.matrix("output")}


def _shapes(model: VocabularyModel) -> PyTree:
    """The parameters without values and without padding."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(model.clone(mesh=None).init, jax.random.key(0), ids)["params"]


def count_parameters(model: VocabularyModel) -> dict[str, int]:
    """Numbers of parameters: `vocabulary` (all that the scheme learns, each matrix once), `body`, `total`; and
    `saved`, what the scheme spares of the two matrices of an untied model. Nothing is allocated.

    >>> count_parameters(TiedEmbedding(vocab_size=50_000, features=4096))["saved"]
    204800000
    """
    params = _shapes(model)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    body = sum(leaf.size for leaf in jax.tree.leaves(params.get("body", {})))
    saved = 2 * model.vocab_size * model.features - (total - body)
    return {"vocabulary": total - body, "body": body, "total": total, "saved": saved}


def account_of(model: VocabularyModel, optimizer: optax.GradientTransformation) -> dict[str, int]:
    """Numbers of parameters, and the bytes of the parameters and of the optimizer's state. Nothing is allocated."""
    params = _shapes(model)

    def size(tree: PyTree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    moments = jax.eval_shape(optimizer.init, params)
    return count_parameters(model) | {"parameter_bytes": size(params), "optimizer_bytes": size(moments)}
