"""The vocabulary loss against float64 NumPy and dense Optax, over shapes, masks, scales and JAX transformations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from tied_lm.model import likelihoods, loss
from tied_lm.model.likelihoods import negative_log_likelihood
from tied_lm.model.logits import block_count

SHAPES = [  # N, V, D, blocks
    (1, 2, 1, 1),
    (1, 1, 3, 1),
    (2, 2, 1, 2),
    (5, 7, 1, 3),
    (37, 19, 5, 1),
    (37, 19, 5, 4),
    (64, 2, 8, 4),
    (100, 131, 16, 3),
    (333, 1001, 24, 5),
    (20, 7, 30, 1),
    (50, 7, 30, 2),
]
OPTIONS = [{}, {"soft_cap": 3.0}, {"z_loss": 0.05}, {"soft_cap": 2.0, "z_loss": 0.1}]


def make(N, V, D, scale=1.0, seed=0):
    """Inputs with logits of about `scale`, a fifth of the tokens masked, some ids absent."""
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((N, D)).astype(np.float32)
    scoring = (rng.standard_normal((V, D)) * scale / np.sqrt(D)).astype(np.float32)
    targets = np.minimum(rng.zipf(1.3, N) - 1, V - 1).astype(np.int32)
    mask = rng.random(N) > 0.2
    mask[0] = True
    return h, scoring, targets, (mask / mask.sum()).astype(np.float32)


def oracle(h, scoring, targets, weights, soft_cap=None, z_loss=0.0):
    """Everything in float64 from the N x V probabilities, with one-hot matrices."""
    h, scoring, weights = (np.asarray(x, np.float64) for x in (h, scoring, weights))
    product = h @ scoring.T
    logits, slope = product, np.ones_like(product)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(product / soft_cap)
        slope = 1 / np.cosh(product / soft_cap) ** 2
    log_sum = np.logaddexp.reduce(logits, axis=1)
    p = np.exp(logits - log_sum[:, None])
    one_hot = np.eye(scoring.shape[0])[targets]
    nll = log_sum - (logits * one_hot).sum(1)
    p_part = weights[:, None] * slope * p * (1 + 2 * z_loss * log_sum[:, None])
    data_part = weights[:, None] * slope * one_hot
    return {
        "loss": (weights * (nll + z_loss * log_sum**2)).sum(),
        "token_loss": nll + z_loss * log_sum**2,
        "nll": nll,
        "data_weight": data_part.sum(1),
        "h_gradient": (p_part - data_part) @ scoring,
        "scoring": (p_part - data_part).T @ h,
        "expected": p_part.T @ h,
        "data": data_part.T @ h,
        "own": (p_part * one_hot).T @ h,
    }


def ours(h, scoring, targets, weights, **options):
    """The same from `loss.py`, compiled anew on each call: what a test put in place of `block_count` holds."""

    @jax.jit
    def compute(h, scoring, targets, weights):
        result = loss.vocabulary_loss(h, scoring, targets, weights, **options)
        zeros_VxD = jnp.zeros_like(result.expected)
        value, (hidden, gradient) = jax.value_and_grad(
            lambda h, scoring: loss.cross_entropy(h, scoring, targets, weights, **options), (0, 1)
        )(h, scoring)
        return result._asdict() | {
            "loss": value,
            "h_gradient": hidden,
            "h_gradient again": result.h_gradient,
            "scoring": gradient,
            "data": zeros_VxD.at[targets].add(result.data_weight[:, None] * h),
            "own": zeros_VxD.at[targets].add(result.own_weight[:, None] * h),
            "forward only": negative_log_likelihood(
                h, scoring, targets, **{k: v for k, v in options.items() if k != "z_loss"}
            ),
        }

    found = compute(h, scoring, targets, weights)
    assert_allclose(found["h_gradient again"], found["h_gradient"], atol=1e-6 * np.abs(found["h_gradient"]).max())
    assert_allclose(found["forward only"], found["nll"], rtol=0, atol=1e-6 * max(1, np.abs(found["nll"]).max()))
    return found


def assert_close(found, true, scoring, tolerance=1e-5):
    """Tables within a fraction of the largest entry of `expected` and `data`, and the rest likewise."""
    table = max(np.abs(true["expected"]).max(), np.abs(true["data"]).max())
    hidden = np.abs(true["h_gradient"]).max() + np.abs(scoring).max() * true["data_weight"].max()
    scales = dict.fromkeys(("expected", "data", "own", "scoring"), table) | {"h_gradient": hidden}
    for name, value in true.items():
        scale = scales.get(name, max(np.abs(value).max(), 1.0))
        assert found[name].dtype == jnp.float32
        assert_allclose(found[name], value, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.fixture
def force_blocks(monkeypatch):
    def force(blocks):
        """Take the tokens in so many blocks; 0 stands for the narrow form."""
        for module in (loss, likelihoods):
            monkeypatch.setattr(module, "block_count", lambda *_: max(blocks, 1))
        monkeypatch.setattr(loss, "is_narrow", lambda *_: blocks == 0)

    return force


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((shape, {}) for shape in SHAPES),
        *(((37, 19, 5, 4), options) for options in OPTIONS[1:]),
        ((5, 7, 9, 1), OPTIONS[3]),
        *(((37, 19, 5, 0), options) for options in OPTIONS),
        ((1, 2, 1, 0), {}),
    ],
    ids=str,
)
def test_float64(shape, options, force_blocks):
    N, V, D, blocks = shape
    force_blocks(blocks)
    inputs = make(N, V, D, scale=2.0)
    assert_close(ours(*inputs, **options), oracle(*inputs, **options), inputs[1])


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize(("largest", "options"), [(80.0, {}), (80.0, {"z_loss": 0.05}), (2000.0, {})], ids=str)
def test_large_logits(largest, options, blocks, force_blocks):
    force_blocks(blocks)
    h, scoring, targets, weights = make(50, 33, 4)
    scoring *= largest / np.abs(h @ scoring.T).max()
    # Rounding of a logit is a relative error of its probability.
    tolerance = 1e-5 * max(1, largest / 80)
    inputs = h, scoring, targets, weights
    assert_close(ours(*inputs, **options), oracle(*inputs, **options), scoring, tolerance)


@pytest.mark.parametrize("target", [0, 18])
def test_all_targets_equal(target, force_blocks):
    force_blocks(3)
    h, scoring, targets, weights = make(37, 19, 5)
    inputs = h, scoring, np.full_like(targets, target), weights
    assert_close(ours(*inputs), oracle(*inputs), scoring)


@pytest.mark.parametrize("seed", range(2))
def test_dense_optax(seed, force_blocks):
    rng = np.random.default_rng(seed)
    N, V, D, blocks = (int(x) for x in rng.integers((2, 2, 1, 2), (200, 400, 40, 6)))
    force_blocks(blocks)
    h, scoring, targets, weights = make(N, V, D, seed=seed)

    def dense(h, scoring, weights):
        return (weights * optax.softmax_cross_entropy_with_integer_labels(h @ scoring.T, targets)).sum()

    def blockwise(h, scoring, weights):
        return loss.cross_entropy(h, scoring, targets, weights)

    true = jax.jit(jax.value_and_grad(dense, (0, 1, 2)))(h, scoring, weights)
    found = jax.jit(jax.value_and_grad(blockwise, (0, 1, 2)))(h, scoring, weights)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, true)


@pytest.mark.parametrize("shape", [(100, 131, 16, 3), (37, 19, 5, 1), (20, 90, 40, 2), (20, 7, 30, 1)], ids=str)
def test_expected_over_marked_tokens_and_over_the_others(shape, force_blocks):
    """Both routes, and both forms in which the blocks sum."""
    force_blocks(shape[3])
    h, scoring, targets, weights = make(*shape[:3])
    marks = (targets % 3 == 0).astype(np.float32)
    assert 0 < marks.sum() < marks.size
    options = {"soft_cap": 3.0}
    result = jax.jit(lambda *a: loss.vocabulary_loss(*a[:4], marks_N=a[4], **options))(
        h, scoring, targets, weights, marks
    )
    plain = jax.jit(lambda *a: loss.vocabulary_loss(*a, **options))(h, scoring, targets, weights)
    parts = [oracle(h, scoring, targets, weights * kept, **options)["expected"] for kept in (marks, 1 - marks)]
    assert_allclose(result.expected_parts, parts, atol=1e-6 * np.abs(parts).max())
    for name in ("expected", "scoring", "h_gradient", "nll", "own_weight"):
        assert_allclose(getattr(result, name), getattr(plain, name), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("options", [{}, OPTIONS[3], {"compute_dtype": jnp.bfloat16}], ids=str)
@pytest.mark.parametrize("blocks", [0, 3])
def test_masked_tokens_add_nothing(options, blocks, force_blocks):
    """Whatever a masked token's target is, and wherever blocks end, the unmasked ones alone decide."""
    force_blocks(blocks)
    h, scoring, targets, weights = make(50, 20, 4)
    kept = weights > 0
    masked_targets = np.where(kept, targets, np.resize([-1, -100, 20, 2**31 - 1], 50)).astype(np.int32)
    f = jax.jit(jax.value_and_grad(lambda *a: loss.cross_entropy(*a, **options), (0, 1)))
    value, (hidden, scoring_gradient) = f(h, scoring, masked_targets, weights)
    true_value, (true_hidden, true_scoring) = f(h[kept], scoring, targets[kept], weights[kept])
    tolerance = 2e-3 if "compute_dtype" in options else 1e-6
    assert_allclose(value, true_value, rtol=tolerance)
    assert_allclose(scoring_gradient, true_scoring, atol=tolerance)
    assert_allclose(hidden[kept], true_hidden, atol=tolerance)
    assert_array_equal(hidden[~kept], 0)
    result = jax.jit(lambda *a: loss.vocabulary_loss(*a, **options))(h, scoring, masked_targets, weights)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(result))


def test_all_masked():
    h, scoring, targets, weights = make(5, 4, 3)
    result = loss.vocabulary_loss(h, scoring, targets, 0 * weights)
    assert_array_equal(result.expected, 0)
    assert_array_equal(result.h_gradient, 0)


@pytest.mark.parametrize("target", [-1, 20])
@pytest.mark.parametrize("blocks", [0, 1])
def test_target_outside_the_vocabulary_is_nan(target, blocks, force_blocks):
    force_blocks(blocks)
    h, scoring, targets, weights = make(8, 20, 4)
    targets[0] = target
    assert jnp.isnan(loss.cross_entropy(h, scoring, targets, weights))
    assert_array_equal(jnp.isnan(negative_log_likelihood(h, scoring, targets)), np.arange(8) == 0)


@pytest.mark.parametrize("options", [{}, OPTIONS[3]], ids=str)
def test_check_grads(options, force_blocks):
    force_blocks(2)
    h, scoring, targets, weights = make(20, 9, 3)
    f = jax.jit(lambda h, scoring, weights: loss.cross_entropy(h, scoring, targets, weights, **options))
    check_grads(f, (h, scoring, weights), order=1, modes=["rev"], eps=1e-2, atol=2e-3, rtol=2e-3)


def test_vmap_equals_loop(force_blocks):
    force_blocks(3)
    h, scoring, targets, weights = (np.stack(x) for x in zip(*(make(40, 17, 6, seed=s) for s in range(3)), strict=True))
    f = jax.jit(jax.value_and_grad(lambda *a: loss.cross_entropy(*a), (0, 1)))
    loop = [f(*inputs) for inputs in zip(h, scoring, targets, weights, strict=True)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *loop)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-6), jax.vmap(f)(h, scoring, targets, weights), stacked)
    shared = jax.vmap(f, (None, 0, None, None))(h[0], scoring, targets[0], weights[0])
    for i in range(3):
        one = f(h[0], scoring[i], targets[0], weights[0])
        jax.tree.map(lambda a, b, i=i: assert_allclose(a[i], b, atol=1e-6), shared, one)


def test_bfloat16_under_vmap(force_blocks):
    force_blocks(2)
    inputs = [np.stack([x, x]) for x in make(64, 32, 16)]
    found = jax.jit(jax.vmap(lambda *a: loss.vocabulary_loss(*a, compute_dtype=jnp.bfloat16)))(*inputs)
    alone = jax.jit(lambda *a: loss.vocabulary_loss(*a, compute_dtype=jnp.bfloat16))(*(x[0] for x in inputs))
    jax.tree.map(lambda a, b: assert_allclose(a[1], b, atol=2e-3), found, alone)


def test_used_twice_and_scaled(force_blocks):
    """Two heads on one matrix: the gradients of both uses add, each times its factor."""
    force_blocks(2)
    h, scoring, targets, weights = make(30, 11, 4)

    def total(cross_entropy, h, scoring):
        return 3 * cross_entropy(h, scoring, targets, weights) - 2 * cross_entropy(
            h**2, scoring, targets[::-1], weights
        )

    def dense(h, scoring, targets, weights):
        return (weights * optax.softmax_cross_entropy_with_integer_labels(h @ scoring.T, targets)).sum()

    found, true = (
        jax.jit(jax.grad(lambda h, s, f=f: total(f, h, s), (0, 1)))(h, scoring) for f in (loss.cross_entropy, dense)
    )
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=2e-6), found, true)


def test_training_in_a_scan(force_blocks):
    """Steps inside one `lax.scan` under jit are those of a Python loop with the dense loss."""
    force_blocks(2)
    h, scoring, targets, weights = make(30, 11, 4)

    def step(scoring, _):
        value, gradient = jax.value_and_grad(loss.cross_entropy, 1)(h, scoring, targets, weights)
        return scoring - gradient, value

    final, values = jax.jit(lambda s: jax.lax.scan(step, s, length=5))(scoring)
    for value in values:
        true = oracle(h, scoring, targets, weights)
        assert_allclose(value, true["loss"], rtol=1e-5)
        scoring = scoring - true["scoring"]
    assert_allclose(final, scoring, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 3])
def test_dtypes(blocks, force_blocks):
    """Half-precision inputs and products: float32 results, gradients in the dtype of what they belong to."""
    force_blocks(blocks)
    dtype = jnp.bfloat16
    h, scoring, targets, weights = make(100, 31, 16)
    inputs = jnp.asarray(h, dtype), jnp.asarray(scoring, dtype), targets, weights
    for compute_dtype in (jnp.float32, dtype):
        result = jax.jit(lambda *a, c=compute_dtype: loss.vocabulary_loss(*a, compute_dtype=c))(*inputs)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(result))
        true = oracle(*inputs)
        for name in ("h_gradient", "expected", "nll"):
            tolerance = 1e-5 if compute_dtype == jnp.float32 else 4e-3
            assert_allclose(getattr(result, name), true[name], atol=tolerance * np.abs(true[name]).max())
    gradients = jax.eval_shape(jax.grad(loss.cross_entropy, (0, 1)), *inputs)
    assert all(x.dtype == dtype for x in gradients)


@pytest.mark.parametrize("largest", [1.0, 25.0, 80.0])
def test_bfloat16_error_is_as_documented(largest, force_blocks):
    force_blocks(2)
    h, scoring, targets, weights = make(512, 300, 64)
    scoring *= largest / np.abs(h @ scoring.T).max()
    bound = {1.0: (3e-5, 2e-4, 3e-5), 25.0: (2e-3, 9e-3, 1e-3), 80.0: (5e-3, 3e-2, 4e-3)}[largest]
    inputs = h, scoring, targets, weights
    found = ours(*inputs, compute_dtype=jnp.bfloat16)
    true = oracle(*inputs)
    table = max(np.abs(true["expected"]).max(), np.abs(true["data"]).max())
    for name in ("expected", "own", "scoring"):
        assert_allclose(found[name], true[name], rtol=0, atol=bound[0] * table)
    assert_allclose(found["h_gradient"], true["h_gradient"], rtol=0, atol=bound[1] * np.abs(true["h_gradient"]).max())
    assert_allclose(found["loss"], true["loss"], rtol=0, atol=bound[2])
    # The nll is exactly that of the rounded operands.
    rounded = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (h, scoring))
    assert_allclose(found["nll"], oracle(*rounded, targets, weights)["nll"], rtol=0, atol=1e-6 * max(5, largest))


@pytest.mark.parametrize("compute_dtype", [jnp.float32, jnp.bfloat16])
def test_never_holds_all_logits(compute_dtype):
    N, V, D = 4096, 50257, 64
    inputs = [
        jax.ShapeDtypeStruct(*x) for x in (((N, D), "float32"), ((V, D), "float32"), ((N,), "int32"), ((N,), "float32"))
    ]
    gradients = jax.value_and_grad(lambda *a: loss.cross_entropy(*a, compute_dtype=compute_dtype), (0, 1))

    def forward(h, scoring, targets, _):
        return negative_log_likelihood(h, scoring, targets, compute_dtype=compute_dtype)

    for f in (gradients, forward):
        compiled = jax.jit(f).lower(*inputs).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * N * V / 12
        sizes = [
            np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
        ]
        assert max(sizes) < N * V / 8


@pytest.mark.parametrize(("N", "V", "D"), [(256, 64, 16), (2048, 512, 64), (1, 50257, 64), (128, 8192, 32)])
def test_small_shapes_are_one_block(N, V, D):
    assert block_count(N, V, D) == 1


def test_tokens_on_several_devices():
    """Run with XLA_FLAGS=--xla_force_host_platform_device_count=4 for more than one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    h, scoring, targets, weights = make(16 * mesh.size, 24, 8)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    placed = [jax.device_put(x, sharding) for x in (h, targets, weights)]
    f = jax.jit(lambda h, t, w: loss.vocabulary_loss(h, scoring, t, w))
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-6), f(*placed), f(h, targets, weights))
