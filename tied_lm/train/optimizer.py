"""The Optax optimizer that a config describes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from tied_lm import config

MUON_RMS = 0.2  # of the entries of an update by Muon: about that of Adam's


def scale_by_coupled_adam(
    b1: float, b2: float, coupled: tuple[str, ...], eps: float = 1e-8
) -> optax.GradientTransformation:
    """Adam in which all rows of a matrix that scores have one second moment (Stollenwerk & Stollenwerk 2025,
    arXiv:2502.08441): the mean over the rows of theirs. Everything else has plain Adam.

    The mean of the rows' moving averages is the moving average of the mean, so one row is kept for a whole matrix.

    Args:
        coupled: names of the parameters that score, whose V rows come first. The paper couples the output matrix
            because all its rows receive a gradient at each step; a matrix that only looks up is not coupled.
    """

    def init(params: dict[str, PyTree]) -> optax.ScaleByAdamState:
        nu = optax.tree.zeros_like(params) | {n: jnp.zeros_like(p[0]) for n, p in params.items() if n in coupled}
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), nu)

    def update(
        gradients: dict[str, PyTree], state: optax.ScaleByAdamState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.ScaleByAdamState]:
        squares = jax.tree.map(jnp.square, gradients)
        squares |= {name: jnp.mean(squares[name], axis=0) for name in squares if name in coupled}
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(gradients, state.mu, b1, 1)
        nu = optax.tree.update_moment(squares, state.nu, b2, 1)
        mean, square = optax.tree.bias_correction(mu, b1, count), optax.tree.bias_correction(nu, b2, count)
        changes = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square)
        return changes, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_muon(beta: float) -> optax.GradientTransformation:
    """Muon for matrices: momentum whose singular values are brought near 1 (Newton-Schulz, Nesterov).

    Scaled so that the root mean square of an update's entries is about 0.2, whatever the shape (Liu et al. 2025,
    arXiv 2502.16982), so that a learning rate means about what it does for Adam.
    """

    def of_matrices(params: PyTree) -> PyTree:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)

    def scale(changes: PyTree, _: PyTree | None) -> PyTree:
        return jax.tree.map(lambda x: MUON_RMS * max(x.shape) ** 0.5 * x, changes)

    return optax.chain(
        optax.contrib.scale_by_muon(beta=beta, weight_dimension_numbers=of_matrices), optax.stateless(scale)
    )


def learning_rate(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
    """Rate of each update, counted from 0. The warm-up starts above 0, so that no update is empty."""
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if optimizer.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, decay_steps=steps)
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup) if warmup else optax.constant_schedule(peak)
    if optimizer.schedule == "constant":
        return rising
    falling = optax.linear_schedule(peak, 0.0, optimizer.decay_steps)
    return optax.join_schedules([rising, falling], [steps - optimizer.decay_steps])


def highest_rate(optimizer: config.Optimizer, steps: int) -> float:
    """The highest rate that any of the run's updates has."""
    rate, last = learning_rate(optimizer, steps), steps - 1
    # It rises to the end of the warm-up, and never again.
    return max(float(rate(jnp.asarray(step))) for step in {min(optimizer.warmup_steps, last), last})


def build(
    optimizer: config.Optimizer, steps: int, vocabulary: tuple[str, ...], scoring: tuple[str, ...]
) -> optax.GradientTransformation:
    """Clipping, then the rule, then decoupled decay, then the rate, which also multiplies the decay.

    Args:
        vocabulary: names of the vocabulary parameters, whose V rows come first, and which have a rate and a decay of
            their own. A tied matrix is one parameter: it is stepped once and decayed once.
        scoring: of these, the ones that score.
    """

    def is_vocabulary(params: dict[str, Any]) -> dict[str, bool]:
        return {name: name in vocabulary for name in params}

    def is_body(params: dict[str, Any]) -> dict[str, bool]:
        return {name: name not in vocabulary for name in params}

    def labels(params: dict[str, PyTree]) -> dict[str, PyTree]:
        kinds: dict[str, PyTree] = {name: "vocabulary" if name in vocabulary else "other" for name in params}
        if "body" in params:
            kinds["body"] = jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "other", params["body"])
        return kinds

    b1, b2 = optimizer.beta1, optimizer.beta2
    adam = optax.scale_by_adam(b1=b1, b2=b2)
    muon = {"vocabulary": adam, "matrix": scale_by_muon(b1), "other": adam}
    decay = (
        optax.add_decayed_weights(optimizer.vocab_weight_decay, is_vocabulary),
        optax.add_decayed_weights(optimizer.weight_decay, is_body),
    )
    rule = {
        "adam": adam,
        "adamw": optax.chain(adam, *decay),
        "sgd": optax.identity(),
        "momentum": optax.trace(decay=b1),
        "muon": optax.chain(optax.partition(muon, labels), *decay),
        "coupled_adam": scale_by_coupled_adam(b1, b2, scoring),
    }[optimizer.name]
    clip = optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity()
    ratio = optimizer.vocab_learning_rate / optimizer.learning_rate
    vocabulary_rate = optax.masked(optax.scale(ratio), is_vocabulary) if ratio else optax.identity()
    return optax.chain(clip, rule, vocabulary_rate, optax.scale_by_learning_rate(learning_rate(optimizer, steps)))
