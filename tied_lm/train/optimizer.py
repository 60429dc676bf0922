"""The Optax optimizer that a config describes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from tied_lm import config

Number = float | np.float32 | Float[Array, ""]
MUON_RMS = 0.2  # of the entries of an update by Muon: about that of Adam's


def scale_by_coupled_adam(
    b1: float, b2: float, coupled: tuple[str, ...], vocab_size: int = 0, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Adam in which all rows of a matrix that scores have one second moment (Stollenwerk & Stollenwerk 2025,
    arXiv:2502.08441): the mean over the rows of theirs. Everything else has plain Adam.

    The mean of the rows' moving averages is the moving average of the mean, so one row is kept for a whole matrix.

    Args:
        coupled: names of the parameters that score, whose V rows come first. The paper couples the output matrix
            because all its rows receive a gradient at each step; a matrix that only looks up is not coupled.
        vocab_size: V, where padding may follow the rows, whose gradient is 0; by default there is none.
    """

    def init(params: dict[str, PyTree]) -> optax.ScaleByAdamState:
        nu = optax.tree.zeros_like(params) | {n: jnp.zeros_like(p[0]) for n, p in params.items() if n in coupled}
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), nu)

    def update(
        gradients: dict[str, PyTree], state: optax.ScaleByAdamState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.ScaleByAdamState]:
        squares = jax.tree.map(jnp.square, gradients)
        of_rows = {name: squares[name] for name in squares if name in coupled}
        squares |= {name: x.sum(axis=0) / (vocab_size or x.shape[0]) for name, x in of_rows.items()}
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


def switches(optimizer: config.Optimizer) -> config.Optimizer:
    """An optimizer with 1 for every number that is an argument of its programs, unless it is 0: what they depend on."""
    names = ["learning_rate", "vocab_learning_rate", "vocab_weight_decay", "clip_norm"]
    if optimizer.name != "muon":
        names.append("weight_decay")
    ones: dict[str, Any] = {name: float(getattr(optimizer, name) > 0) for name in names}
    return dataclasses.replace(optimizer, **ones)


class Hyperparameters(NamedTuple):
    """What multiplies or bounds an update: arguments of the compiled programs, which serve all values but 0."""

    learning_rate: Number  # the highest
    start: Number  # of the warm-up
    climb: Number  # start - learning_rate, rounded once
    vocab_ratio: Number  # of the rate of the vocabulary to that of all else
    weight_decay: Number
    vocab_weight_decay: Number
    clip_norm: Number

    @classmethod
    def of(cls, optimizer: config.Optimizer) -> "Hyperparameters":
        """As Python's numbers, which a program would hold as constants."""
        peak = optimizer.learning_rate
        start = peak / (optimizer.warmup_steps + 1)  # above 0, so that no update is empty
        return cls(
            peak,
            start,
            start - peak,
            optimizer.vocab_learning_rate / peak,
            optimizer.weight_decay,
            optimizer.vocab_weight_decay,
            optimizer.clip_norm,
        )

    def as_arguments(self) -> "Hyperparameters":
        """The same as float32, to call a program with."""
        return Hyperparameters(*(np.float32(value) for value in self))


def schedule_of(optimizer: config.Optimizer, steps: int, values: Hyperparameters) -> optax.Schedule:
    """Rate of each update, counted from 0; of the optimizer only what is not in the values counts.

    The formulas are those of `optax.linear_schedule` and `optax.cosine_decay_schedule`.
    """
    warmup = optimizer.warmup_steps

    def rising(step: ArrayLike) -> Any:
        if not warmup:
            return values.learning_rate
        return values.climb * (1 - jnp.clip(step, 0, warmup) / warmup) + values.learning_rate

    if optimizer.schedule == "constant":
        return rising
    if optimizer.schedule == "cosine":
        falling = optax.cosine_decay_schedule(values.learning_rate, steps - warmup)
        return optax.join_schedules([rising, falling], [warmup])
    falling = optax.linear_schedule(values.learning_rate, 0.0, optimizer.decay_steps)
    return optax.join_schedules([rising, falling], [steps - optimizer.decay_steps])


def learning_rate(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
    """Rate of each update, counted from 0."""
    return schedule_of(optimizer, steps, Hyperparameters.of(optimizer))


def highest_rate(optimizer: config.Optimizer, steps: int) -> float:
    """The highest rate that any of the run's updates has."""
    rate, last = learning_rate(optimizer, steps), steps - 1
    # It rises to the end of the warm-up, and never again.
    return max(float(rate(jnp.asarray(step))) for step in {min(optimizer.warmup_steps, last), last})


def scale_by_rates(
    rate: optax.Schedule, ratio: Number, is_vocabulary: Callable[[dict[str, Any]], dict[str, bool]]
) -> optax.GradientTransformation:
    """As `optax.scale_by_learning_rate`; the rate of the vocabulary is a multiple of that of all else."""

    def update(
        changes: dict[str, PyTree], state: optax.ScaleByScheduleState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.ScaleByScheduleState]:
        step_size = -1 * rate(state.count)
        sizes = {name: ratio * step_size if own else step_size for name, own in is_vocabulary(changes).items()}
        scaled = {name: jax.tree.map(lambda x, size=sizes[name]: size * x, tree) for name, tree in changes.items()}
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(lambda _: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), update)


def build(
    optimizer: config.Optimizer,
    steps: int,
    vocabulary: tuple[str, ...],
    scoring: tuple[str, ...],
    values: Hyperparameters | None = None,
    vocab_size: int = 0,
) -> optax.GradientTransformation:
    """Clipping, then the rule, then decoupled decay, then the rate, which also multiplies the decay.

    Args:
        vocabulary: names of the vocabulary parameters, whose V rows come first, and which have a rate and a decay of
            their own. A tied matrix is one parameter: it is stepped once and decayed once.
        scoring: of these, the ones that score.
        values: by default those of the optimizer, which else says only which of them are 0.
        vocab_size: see `scale_by_coupled_adam`.
    """
    given = Hyperparameters.of(optimizer) if values is None else values
    # A constant 0 adds nothing at all. That of Muon's matrices is a constant, or the compiler rounds the sum otherwise.
    weight_decay = given.weight_decay if optimizer.weight_decay and optimizer.name != "muon" else optimizer.weight_decay
    vocab_weight_decay = given.vocab_weight_decay if optimizer.vocab_weight_decay else 0.0

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
        optax.add_decayed_weights(vocab_weight_decay, is_vocabulary),
        optax.add_decayed_weights(weight_decay, is_body),
    )
    rule = {
        "adam": adam,
        "adamw": optax.chain(adam, *decay),
        "sgd": optax.identity(),
        "momentum": optax.trace(decay=b1),
        "muon": optax.chain(optax.partition(muon, labels), *decay),
        "coupled_adam": scale_by_coupled_adam(b1, b2, scoring, vocab_size),
    }[optimizer.name]
    clip = optax.clip_by_global_norm(given.clip_norm) if optimizer.clip_norm else optax.identity()
    rate, same = schedule_of(optimizer, steps, given), optax.identity()
    if not optimizer.vocab_learning_rate:
        return optax.chain(clip, rule, same, optax.scale_by_learning_rate(rate))
    # The state is that of two scalings, of the vocabulary and of all, as they were before they became one.
    return optax.chain(
        clip, rule, optax.masked(same, is_vocabulary), scale_by_rates(rate, given.vocab_ratio, is_vocabulary)
    )
