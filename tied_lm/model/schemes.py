"""The tying schemes: of S (V, D) and what else is learned, what looks up and what scores.

Every scheme is a class, found by its name in `SCHEMES`; its own fields are options from the config's group `scheme`.
Where nothing else is said, the initial logits have the spread of plain tying, `total` is the gradient that `embedding`
receives, and the rows of `scoring` sum to 0, since every softmax sums to 1.
"""

from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from tied_lm.bands import UNSEEN
from tied_lm.checks import Allowed, ConfigError, at_least, countable, fraction, not_negative, positive, wide
from tied_lm.model.embedding import (
    Params,
    ScoringGradient,
    Step,
    TiedEmbedding,
    UntiedEmbedding,
    VocabularyModel,
    weigh,
)


class ScaledInput(TiedEmbedding):
    """Lookup sqrt(D) S[x], scoring h S^T (Vaswani et al. 2017, Gemma). S itself is never scaled. V D parameters."""

    def check(self) -> None:
        if self.scale_input:
            raise ConfigError(
                "model.scale_input", True, "false with model.tying = 'scaled_input', which does just that"
            )

    @property
    def input_scale(self) -> float:
        return self.features**0.5


class ScaledOutput(TiedEmbedding):
    """Lookup S[x], scoring h S^T / sqrt(D) (T5, MaxText): initial logits are smaller. V D parameters."""

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N D"], Float[Array, "V D"]]:
        return h / self.features**0.5, p["embedding"]


class SoftCap(TiedEmbedding):
    """Lookup S[x], scoring c tanh(h S^T / c) (Gemma 2, arXiv:2408.00118). V D parameters."""

    soft_cap: Annotated[float, positive] = 30.0  # c

    no_sum_rule: ClassVar[str] = "each logit's slope 1 - (logit / c)^2 weighs its term of the softmax's sum"

    @property
    def logit_cap(self) -> float:
        return self.soft_cap


class Projection(TiedEmbedding):
    """Lookup S[x], scoring h P S^T, and the penalty |P| in the loss (Press & Wolf 2017, arXiv:1608.05859).

    |P| is the Frobenius norm. P starts as the identity. V D + D^2 parameters.
    """

    projection_penalty: Annotated[float, not_negative] = 0.15  # nats for each unit of |P|

    others: ClassVar[tuple[str, ...]] = ("projection",)

    def declare(self) -> Params:
        return super().declare() | {"projection": self.param("projection", _identity, self.features)}

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N D"], Float[Array, "V D"]]:
        return h @ p["projection"], p["embedding"]

    def penalty(self, p: Params) -> Float[Array, ""]:
        return self.projection_penalty * jnp.linalg.norm(p["projection"])


class WidthScaled(TiedEmbedding):
    """Lookup S[x], scoring (m D_0 / D) h S^T: the readout of maximal update parametrisation (arXiv:2203.03466).

    At D = D_0 and m = 1 this is plain tying; with growing D the logits shrink. V D parameters.
    """

    readout_multiplier: Annotated[float, positive] = 1.0  # m
    base_features: Annotated[int, at_least(1), wide] = 64  # D_0, the width at which the scale is m

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N D"], Float[Array, "V D"]]:
        return h * (self.readout_multiplier * self.base_features / self.features), p["embedding"]


class LateUntie(VocabularyModel):
    """Tied up to `untie_step`, then untied: `output` and `embedding` part with equal values and optimizer's moments.

    2 V D parameters, of which V D are a copy while tied: `output` alone is trained then, with the gradients of both
    uses, and `embedding` is given its updates and its moments. From the step on, `total` is hypothetical.
    """

    untie_step: Annotated[int, at_least(1), countable] = 500

    scorer: ClassVar[str] = "output"
    vocabulary: ClassVar[tuple[str, ...]] = ("embedding", "output")

    @property
    def untied_from(self) -> int:
        return self.untie_step

    def declare(self) -> Params:
        p = super().declare()
        return p | {"output": self.param("output", lambda key: p["embedding"] + 0.0)}

    def add_lookup(
        self, gradients: Params, ids_N: Int[Array, "N"], lookup_NxR: Float[Array, "N D"], step: Step
    ) -> Params:
        tied = self.tied_at(step)
        # Into the table of the scoring, as in plain tying, so that the sums have the same bits.
        table_VxD = jnp.where(tied, gradients["output"], gradients["embedding"]).at[ids_N].add(lookup_NxR)
        output_VxD = jnp.where(tied, table_VxD, gradients["output"])
        return gradients | {"embedding": jnp.where(tied, 0, table_VxD), "output": output_VxD}

    def share(self, tree: PyTree, step: Step) -> PyTree:
        def has_both(node: PyTree) -> bool:
            return isinstance(node, dict) and {"embedding", "output"} <= node.keys()

        def one_from_other(embedding: Array, output: Array) -> Array:
            # Rows that have one second moment together, and each one of their own once they part, start with that one.
            return jnp.where(self.tied_at(step), jnp.broadcast_to(output, embedding.shape), embedding)

        def shared(node: PyTree) -> PyTree:
            if not has_both(node):
                return node
            # Computed once: the compiler would do so for each matrix, and round one of them otherwise.
            output = jax.lax.optimization_barrier(node["output"])
            return node | {"embedding": jax.tree.map(one_from_other, node["embedding"], output), "output": output}

        return jax.tree.map(shared, tree, is_leaf=has_both)


class Centred(TiedEmbedding):
    """Plain tying, and after each update the mean row is subtracted from all rows (arXiv:2601.02031). V D parameters.

    A softmax does not see what all logits share, so that the scoring is the same; the lookup is not. (In an untied
    model this would change the logits, and neither the loss nor its gradients.)
    """

    def share(self, tree: PyTree, step: Step) -> PyTree:
        changes, params, opt_state = tree
        mean_D = self.layout.mean_of_rows(params["embedding"])
        # Off the change, too, which then is what the matrix really does.
        changes, params = (
            part | {"embedding": self.layout.only_real(part["embedding"] - mean_D)} for part in (changes, params)
        )
        return changes, params, opt_state


class PathWeights(TiedEmbedding):
    """Plain tying, but `embedding` receives alpha lookup + beta scoring (arXiv:2603.26663). V D parameters.

    This is no loss's gradient. What is recorded has the weights in it; hidden vectors and the body are not affected.
    """

    lookup_weight: Annotated[float, not_negative] = 1.0  # alpha
    scoring_weight: Annotated[float, not_negative] = 1.0  # beta

    def receive(
        self, lookup_NxR: Float[Array, "N D"], scoring: ScoringGradient
    ) -> tuple[Float[Array, "N D"], ScoringGradient]:
        return weigh(self.lookup_weight, lookup_NxR), scoring.weighed(self.scoring_weight)


class LookupOnly(TiedEmbedding):
    """Plain tying with the gradient of the scoring stopped: `embedding` receives the lookup's alone. V D parameters."""

    def receive(
        self, lookup_NxR: Float[Array, "N D"], scoring: ScoringGradient
    ) -> tuple[Float[Array, "N D"], ScoringGradient]:
        return lookup_NxR, scoring.weighed(0)


class ScoringOnly(TiedEmbedding):
    """Plain tying with the gradient of the lookup stopped: `embedding` receives the scoring's alone. V D parameters."""

    def receive(
        self, lookup_NxR: Float[Array, "N D"], scoring: ScoringGradient
    ) -> tuple[Float[Array, "N D"], ScoringGradient]:
        return weigh(0, lookup_NxR), scoring


class GatedRareRows(TiedEmbedding):
    """Plain tying with the push of rare rows scaled down, after AGG (Yu et al. 2022, arXiv:2109.03127).

    A row is rare from band `rare_band` on. Its push is gated by where it comes from: from tokens whose target is
    frequent, and from those whose target is rare. (AGG gates by counts over the last batches; here the frequencies are
    those of all the training tokens, and the gates are constants.) This is no loss's gradient; what is recorded is
    gated, and both parts of the push are recorded by themselves. V D parameters.
    """

    rare_band: Annotated[int, at_least(0), Allowed(f"at most {UNSEEN}", lambda x: x <= UNSEEN)] = 4
    gate_from_frequent: Annotated[float, fraction] = 0.1
    gate_from_rare: Annotated[float, fraction] = 1.0

    push_parts: ClassVar[tuple[str, ...]] = ("push_from_frequent", "push_from_rare")
    no_sum_rule: ClassVar[str] = "the push of rare rows is scaled down, their share of the softmax's sum is not"

    def check(self) -> None:
        if self.bands and max(self.bands) < self.rare_band:
            allowed = f"at most {max(self.bands)}, the last band that has rows here"
            raise ConfigError("scheme.rare_band", self.rare_band, allowed)

    def is_rare(self) -> Float[Array, "V"]:
        """1 for rare rows, else 0."""
        return self.layout.padded(jnp.asarray([float(band >= self.rare_band) for band in self.bands]))

    def marks(self, targets_N: Int[Array, "N"]) -> Float[Array, "N"]:
        return self.is_rare()[targets_N]

    def receive(
        self, lookup_NxR: Float[Array, "N D"], scoring: ScoringGradient
    ) -> tuple[Float[Array, "N D"], ScoringGradient]:
        own_VxD = scoring.at_targets(scoring.own_weight)
        rare_Vx1 = self.is_rare()[:, None]
        assert scoring.expected_parts is not None  # as there are marks
        from_rare_VxD, from_frequent_VxD = scoring.expected_parts
        # A row's own tokens are of its kind: they are taken out of that part alone.
        push = {
            "push_from_frequent": jnp.where(
                rare_Vx1 > 0, self.gate_from_frequent * from_frequent_VxD, from_frequent_VxD - own_VxD
            ),
            "push_from_rare": jnp.where(rare_Vx1 > 0, self.gate_from_rare * (from_rare_VxD - own_VxD), from_rare_VxD),
        }
        expected_VxD = sum(push.values()) + own_VxD
        table_VxD = expected_VxD - scoring.at_targets(scoring.data_weight)
        return lookup_NxR, scoring._replace(table=table_VxD, expected=expected_VxD, push_parts=push)


class LowRank(TiedEmbedding):
    """Lookup S[x], scoring h (S + A B)^T with A (V, r), B (r, D). A starts at 0. V D + r (V + D) parameters."""

    rank: Annotated[int, at_least(1), wide] = 4  # r

    vocabulary: ClassVar[tuple[str, ...]] = ("embedding", "low_rank_rows")
    others: ClassVar[tuple[str, ...]] = ("low_rank_rows", "low_rank_columns")

    def declare(self) -> Params:
        p = super().declare()
        p["low_rank_rows"] = self.param("low_rank_rows", nn.initializers.zeros, (self.layout.rows, self.rank))
        scale = nn.initializers.normal(stddev=self.rank**-0.5)
        return p | {"low_rank_columns": self.param("low_rank_columns", scale, (self.rank, self.features))}

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N D"], Float[Array, "V D"]]:
        return h, p["embedding"] + p["low_rank_rows"] @ p["low_rank_columns"]


class Factorised(TiedEmbedding):
    """Lookup S[x] P, scoring h (S P)^T, with S (V, d) and P (d, D) (ALBERT, arXiv:1909.11942, tied).

    Computed as (h P^T) S^T, so that the split and the product with V rows are of width d. V d + d D parameters.

    At the start the entries of S P have the spread of plain tying. Without a body the logits S P P^T S^T are wider by
    sqrt(1 + D / d) all the same: the entries of P P^T are correlated, whatever P of rank d is.
    """

    factor_features: Annotated[int, at_least(1), wide] = 16  # d

    others: ClassVar[tuple[str, ...]] = ("factor",)

    @property
    def row_width(self) -> int:
        return self.factor_features

    def declare(self) -> Params:
        scale = nn.initializers.normal(stddev=self.factor_features**-0.5)
        shape = (self.factor_features, self.features)
        return super().declare() | {"factor": self.param("factor", scale, shape)}

    def look_up(self, rows: Float[Array, "*N d"], p: Params) -> Float[Array, "*N D"]:
        return rows @ p["factor"]

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N d"], Float[Array, "V d"]]:
        return h @ p["factor"].T, p["embedding"]


class SpdPair(TiedEmbedding):
    """Lookup T^-1 S[x], scoring S (T h), with T = C C^T symmetric positive definite.

    The pair (T^-1, T) is that of pseudo-inverse tying (arXiv:2602.04556), the rest is not: there the columns of S are
    orthonormal, so that each matrix is the other's pseudo-inverse; here S is learned freely, as in the other schemes.
    It needs a body: without one T and T^-1 cancel, and T is never trained.

    Learned is the lower triangle of C row by row, the diagonal as its logarithm; T starts as the identity.
    V D + D (D + 1) / 2 parameters.
    """

    others: ClassVar[tuple[str, ...]] = ("triangle",)

    def check(self) -> None:
        if self.body is None:
            allowed = "another scheme, or a model.body other than 'none', without which T and its inverse cancel"
            raise ConfigError("model.tying", "spd_pair", allowed)

    def declare(self) -> Params:
        shape = (self.features * (self.features + 1) // 2,)
        return super().declare() | {"triangle": self.param("triangle", nn.initializers.zeros, shape)}

    def _factor(self, p: Params) -> Float[Array, "D D"]:
        """C."""
        lower_DxD = jnp.zeros((self.features, self.features)).at[jnp.tril_indices(self.features)].set(p["triangle"])
        return jnp.tril(lower_DxD, -1) + jnp.diag(jnp.exp(jnp.diag(lower_DxD)))

    def look_up(self, rows: Float[Array, "*N D"], p: Params) -> Float[Array, "*N D"]:
        columns_DxN = rows.reshape(-1, self.features).T
        return jax.scipy.linalg.cho_solve((self._factor(p), True), columns_DxN).T.reshape(rows.shape)

    def score(self, h: Float[Array, "*N D"], p: Params) -> tuple[Float[Array, "*N D"], Float[Array, "V D"]]:
        c_DxD = self._factor(p)
        return h @ c_DxD @ c_DxD.T, p["embedding"]


def _identity(_: Array, size: int) -> Float[Array, "D D"]:
    return jnp.eye(size)


SCHEMES: dict[str, type[VocabularyModel]] = {
    "tied": TiedEmbedding,
    "untied": UntiedEmbedding,
    "scaled_input": ScaledInput,
    "scaled_output": ScaledOutput,
    "soft_cap": SoftCap,
    "projection": Projection,
    "width_scaled": WidthScaled,
    "late_untie": LateUntie,
    "centred": Centred,
    "path_weights": PathWeights,
    "lookup_only": LookupOnly,
    "scoring_only": ScoringOnly,
    "gated_rare_rows": GatedRareRows,
    "low_rank": LowRank,
    "factorised": Factorised,
    "spd_pair": SpdPair,
}

# Names in older folders, which can be read.
RENAMED = {"pseudo_inverse": "spd_pair, its name by now, since it is not the pseudo-inverse tying of arXiv:2602.04556"}
