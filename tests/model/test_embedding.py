"""What the tied and the untied model are, and how many parameters they have."""

import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from tied_lm import TiedEmbedding, UntiedEmbedding, loss_and_gradients
from tied_lm.model.bodies import Mlp
from tied_lm.model.embedding import count_parameters

V, D = 23, 6
IDS = np.array([3, 0, 22, 3, 7])


@pytest.fixture(scope="module")
def matrix():
    return np.random.default_rng(1).standard_normal((V, D)).astype(np.float32)


def scores(matrix, ids):
    return np.asarray(TiedEmbedding(V, D).apply({"params": {"embedding": matrix}}, ids))


def start(model, seed=0):
    return model.init(jax.random.key(seed), IDS)["params"]


def test_worked_example():
    w = jnp.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    logits = TiedEmbedding(3, 2).apply({"params": {"embedding": w}}, jnp.array([0, 2, 0]))
    assert logits.tolist() == [[1, 2, 0], [0, 0, 1], [1, 2, 0]]
    assert logits[0, 1] > logits[0, 0]  # the input token need not score highest


def test_init_has_one_leaf():
    variables = TiedEmbedding(V, D).init(jax.random.key(0), IDS)
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path(variables)
    assert jax.tree_util.keystr(path, simple=True, separator="/") == "params/embedding"
    assert leaf.shape == (V, D)
    assert leaf.dtype == jnp.float32


def test_score_of_the_token_itself_is_its_squared_norm(matrix):
    own = np.take_along_axis(scores(matrix, IDS), IDS[:, None], axis=-1)[:, 0]
    assert (own >= 0).all()
    np.testing.assert_allclose(own, (matrix[IDS] ** 2).sum(-1), rtol=1e-6)


def test_equal_ids_give_equal_rows(matrix):
    logits = scores(matrix, IDS)
    np.testing.assert_array_equal(logits[0], logits[3])
    assert (logits[0] != logits[1]).all()


def test_permuted_ids_permute_rows(matrix):
    order = np.array([4, 2, 0, 1, 3])
    np.testing.assert_array_equal(scores(matrix, IDS[order]), scores(matrix, IDS)[order])


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3)])
def test_ids_of_any_rank(matrix, shape):
    ids = np.random.default_rng(2).integers(0, V, shape)
    logits = scores(matrix, ids)
    assert logits.shape == (*shape, V)
    np.testing.assert_allclose(logits, matrix[ids] @ matrix.T, rtol=1e-5, atol=1e-5)


def test_untied_looks_up_in_one_matrix_and_scores_with_the_other(matrix):
    output = matrix[::-1] * 2
    logits = UntiedEmbedding(V, D).apply({"params": {"embedding": matrix, "output": output}}, IDS)
    np.testing.assert_allclose(logits, matrix[IDS] @ output.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", [None, Mlp()])
def test_both_arms_start_from_the_same_values(body):
    tied, untied = start(TiedEmbedding(V, D, body)), start(UntiedEmbedding(V, D, body))
    output = untied.pop("output")
    jax.tree.map(np.testing.assert_array_equal, tied, untied)
    assert not np.isin(output, tied["embedding"]).any()


def test_another_key_gives_other_values():
    assert not np.isin(*(start(TiedEmbedding(V, D), seed)["embedding"] for seed in (0, 1))).any()


def test_both_matrices_have_the_same_normal_distribution():
    params = UntiedEmbedding(200, 50).init(jax.random.key(3), IDS)["params"]
    for name in ("embedding", "output"):
        sample = np.asarray(params[name]).ravel()
        assert stats.kstest(sample, stats.norm(0, 0.02).cdf).pvalue > 1e-3
        assert stats.kstest(sample, stats.norm(0, 0.022).cdf).pvalue < 1e-3  # the sample can tell
    assert abs(stats.pearsonr(np.ravel(params["embedding"]), np.ravel(params["output"])).statistic) < 0.04


def test_the_same_start_does_not_tie():
    model = UntiedEmbedding(V, D, same_start=True)
    params = start(model)
    np.testing.assert_array_equal(params["embedding"], params["output"])
    np.testing.assert_array_equal(params["embedding"], start(TiedEmbedding(V, D))["embedding"])
    _, gradients, _ = jax.jit(loss_and_gradients, static_argnums=0)(model, params, IDS, np.array([0, 1, 2, 3, 4]))
    after = optax.apply_updates(params, gradients)
    assert (np.asarray(after["embedding"]) != np.asarray(after["output"])).any(axis=-1).all()


def test_each_use_can_have_a_copy_of_its_own(matrix):
    model = TiedEmbedding(V, D)
    rows, at_scoring = np.arange(5 * D, dtype=np.float32).reshape(5, D), {"embedding": 2 * matrix}
    h, scoring = model.apply({"params": {"embedding": matrix}}, IDS, rows=rows, at_scoring=at_scoring, method="hidden")
    np.testing.assert_array_equal(h, rows)
    np.testing.assert_array_equal(scoring, 2 * matrix)


def test_rows_that_no_id_selects_receive_gradient(matrix):
    model, weights = TiedEmbedding(V, D), np.arange(1.0, V + 1)
    gradient = jax.grad(lambda w: jnp.sum(model.apply({"params": {"embedding": w}}, IDS) * weights))(matrix)
    absent = ~np.isin(np.arange(V), IDS)
    assert absent.sum() == V - 4
    np.testing.assert_allclose(gradient[absent], weights[absent, None] * matrix[IDS].sum(0), rtol=1e-5, atol=1e-5)


class TwiceInTraining(nn.Module):
    def __call__(self, x, *, train=False):
        return 2 * x if train else x


def test_the_body_is_told_whether_this_is_training(matrix):
    model, variables = UntiedEmbedding(V, D, TwiceInTraining()), {"params": {"embedding": matrix, "output": matrix}}
    np.testing.assert_array_equal(model.apply(variables, IDS, train=True), 2 * model.apply(variables, IDS))
    assert model.apply(variables, IDS).any()


class Attending(nn.Module):
    """The route through `nn.Embed` and `attend`."""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(V, D)
        return embed.attend(embed(ids))


def test_embed_and_attend_give_the_same_numbers(matrix):
    logits = Attending().apply({"params": {"Embed_0": {"embedding": matrix}}}, IDS)
    np.testing.assert_allclose(logits, scores(matrix, IDS), rtol=1e-6)


def test_the_default_start_of_embed_is_another_one():
    def spread(module):
        return float(np.std(module.init(jax.random.key(0), jnp.array([0]))["params"]["embedding"]))

    assert spread(nn.Embed(500, 16)) == pytest.approx(16**-0.5, rel=0.05)
    assert spread(TiedEmbedding(500, 16)) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("body", [None, Mlp()])
def test_counts_are_those_of_the_arrays(body):
    for model, matrices in ((TiedEmbedding(V, D, body), 1), (UntiedEmbedding(V, D, body), 2)):
        counts = count_parameters(model)
        assert counts["vocabulary"] == matrices * V * D
        assert counts["body"] == (0 if body is None else D * 4 * D + 4 * D + 4 * D * D + D)
        assert counts["total"] == counts["vocabulary"] + counts["body"]
        assert counts["total"] == sum(leaf.size for leaf in jax.tree.leaves(start(model)))
        assert counts["saved"] == (2 - matrices) * V * D


def test_savings_of_a_large_vocabulary():
    count_parameters(TiedEmbedding(2, 1))
    begin = time.perf_counter()
    tied, untied = (count_parameters(scheme(50_000, 4096)) for scheme in (TiedEmbedding, UntiedEmbedding))
    assert time.perf_counter() - begin < 0.5
    assert tied["saved"] == untied["total"] - tied["total"] == 204_800_000
    assert untied["total"] == 2 * tied["total"] == 409_600_000


def test_counting_allocates_nothing():
    # 16 TB: more than any machine that runs this could allocate.
    assert count_parameters(UntiedEmbedding(10**9, 2048))["total"] == 4_096_000_000_000
