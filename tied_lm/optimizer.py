"""The Optax optimizer that a config describes."""

from typing import Any

import optax

from tied_lm import config


def learning_rate(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
    """Rate of each update, counted from 0. The warm-up starts above 0, so that no update is empty."""
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if optimizer.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, decay_steps=max(steps, warmup + 1))
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup) if warmup else optax.constant_schedule(peak)
    if optimizer.schedule == "constant":
        return rising
    falling = optax.linear_schedule(peak, 0.0, optimizer.decay_steps)
    return optax.join_schedules([rising, falling], [steps - optimizer.decay_steps])


def build(optimizer: config.Optimizer, steps: int, vocabulary: tuple[str, ...]) -> optax.GradientTransformation:
    """Clipping, then the rule, then decoupled decay, then the rate.

    Args:
        vocabulary: names of the vocabulary parameters, which have a decay of their own. A tied matrix is one
            parameter: it is stepped once and decayed once.
    """

    def is_vocabulary(params: dict[str, Any]) -> dict[str, bool]:
        return {name: name in vocabulary for name in params}

    def is_body(params: dict[str, Any]) -> dict[str, bool]:
        return {name: name not in vocabulary for name in params}

    adam = optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2)
    rule = {
        "adam": adam,
        "adamw": optax.chain(
            adam,
            optax.add_decayed_weights(optimizer.vocab_weight_decay, is_vocabulary),
            optax.add_decayed_weights(optimizer.weight_decay, is_body),
        ),
        "sgd": optax.identity(),
        "momentum": optax.trace(decay=optimizer.beta1),
    }[optimizer.name]
    clip = optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity()
    return optax.chain(clip, rule, optax.scale_by_learning_rate(learning_rate(optimizer, steps)))
