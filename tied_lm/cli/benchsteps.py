"""The benchmark of single training steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tied_lm import TiedEmbedding
from tied_lm.cli.rounds import Run, interleave, ratio
from tied_lm.model.bodies import Transformer
from tied_lm.model.loss import vocabulary_loss
from tied_lm.model.split import backward, stats_of

HEADS, LENGTH = 4, 128  # of the Transformer, and tokens in a sequence


class Shape(NamedTuple):
    vocab_size: int
    features: int
    tokens: int
    layers: int = 0  # of a Transformer; without any there is no body

    def __str__(self) -> str:
        return ", ".join(map(str, self[:3])) + (f" +{self.layers}" if self.layers else "")


SHAPES = (
    Shape(512, 64, 2048),
    Shape(8192, 128, 2048),
    Shape(50257, 256, 1024),
    Shape(50257, 64, 4096),
    Shape(16384, 512, 512),
    Shape(8192, 128, 2048, 4),
    Shape(50257, 256, 1024, 4),
)
GROWTH = (1024, 2048, 4096, 8192, 16384, 32768, 65536)  # V, at D = 64 and N = 1024


def inputs_of(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, inputs and targets (distributed like Zipf's), the same for every library."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, shape.tokens + 1) - 1, shape.vocab_size - 1).astype(np.int32)
    weight = (rng.standard_normal((shape.vocab_size, shape.features)) * 0.02).astype(np.float32)
    return weight, ids[:-1].reshape(-1, LENGTH), ids[1:].reshape(-1, LENGTH)


def jax_step(shape: Shape, kind: str, dtype: str = "float32") -> Run:
    """A whole training step of a tied model: lookup, loss, gradients, Adam, donated state.

    Args:
        kind: `dense` (optax cross-entropy and autodiff), `plain` (this library), or `split` (with row statistics).
    """
    weight, *ids = inputs_of(shape)
    x, y = map(jnp.asarray, ids)
    body = Transformer(dtype, depth=shape.layers, heads=HEADS) if shape.layers else None
    model = TiedEmbedding(shape.vocab_size, shape.features, body, dtype)
    params = model.init(jax.random.key(0), x)["params"] | {"embedding": jnp.asarray(weight)}
    optimizer = optax.adam(1e-3)

    def dense_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, moments = state
        if kind == "dense":
            loss, gradients = jax.value_and_grad(dense_loss)(params, x, y)
            out: Any = loss
        else:
            b = backward(model, params, x, y, train=True)
            gradients, out = b.gradients, (b.loss, stats_of(b)) if kind == "split" else b.loss
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), out

    compiled = jax.jit(step, donate_argnums=0)
    state = (params, optimizer.init(params))

    def run() -> None:
        nonlocal state
        state, out = compiled(state, x, y)
        jax.block_until_ready((state, out))

    return run


def products(shape: Shape) -> Run:
    """The three float32 products of a step and nothing else: a bound on what a step can reach."""
    vocab_size, features, count = shape[:3]
    h, w = jnp.ones((count, features)), jnp.ones((vocab_size, features))
    z = jnp.ones((count, vocab_size))
    run = jax.jit(lambda h, w, z: ((h @ w.T).sum(), (z @ w).sum(), (h.T @ z).sum()))
    return lambda: jax.block_until_ready(run(h, w, z))


def loss_memory(shape: Shape) -> float:
    """Peak temporary memory of the loss and its gradients over that of the dense form, from XLA's own analysis."""
    vocab_size, features, count = shape[:3]
    h, w = (jax.ShapeDtypeStruct((rows, features), jnp.float32) for rows in (count, vocab_size))
    y = jax.ShapeDtypeStruct((count,), jnp.int32)

    def dense(h: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(h @ w.T, y).mean()

    def ours(h: jax.Array, w: jax.Array, y: jax.Array) -> Any:
        return vocabulary_loss(h, w, y, jnp.full(count, 1 / count))

    def peak(function: Callable[..., Any]) -> int:
        analysis: Any = jax.jit(function).lower(h, w, y).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    return peak(ours) / peak(jax.value_and_grad(dense, (0, 1)))


def measure_shape(shape: Shape, rounds: int, with_torch: bool) -> dict[str, Any]:
    runs = {"dense": jax_step(shape, "dense")} | ({} if shape.layers else {"products": products(shape)})
    for dtype in ("float32", "bfloat16"):
        for kind in ("plain", "split"):
            runs[f"{kind} {dtype}"] = jax_step(shape, kind, dtype)
    if with_torch:
        from tied_lm.cli.torch_model import torch_step

        for name, autocast in (("torch float32", False), ("torch bfloat16", True)):
            runs[name] = torch_step(*inputs_of(shape), shape.layers, HEADS, autocast)
    times = interleave(runs, rounds)
    median = {name: float(np.median(t)) for name, t in times.items()}
    ours = min(("split float32", "split bfloat16"), key=median.__getitem__)
    found: dict[str, Any] = {
        "shape": str(shape),
        "ms": {name: 1e3 * seconds for name, seconds in median.items()},
        "split / plain": ratio(times, "split float32", "plain float32"),
        "split / plain, bf16": ratio(times, "split bfloat16", "plain bfloat16"),
        "split f32 / dense": ratio(times, "split float32", "dense"),
        "split bf16 / dense": ratio(times, "split bfloat16", "dense"),
    }
    if not shape.layers:
        found["split f32 / products"] = ratio(times, "split float32", "products")
        found["loss memory / dense"] = loss_memory(shape)
    if with_torch:
        best = min(("torch float32", "torch bfloat16"), key=median.__getitem__)
        found["torch / split"] = ratio(times, best, ours)
    return found


def measure_growth(rounds: int) -> float:
    """Log-log slope of the time of a step with the split against V."""
    times = interleave({str(v): jax_step(Shape(v, 64, 1024), "split") for v in GROWTH}, rounds)
    return float(np.polyfit(np.log(GROWTH), [np.log(np.median(times[str(v)])) for v in GROWTH], 1)[0])
