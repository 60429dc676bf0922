"""Text from a model, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from tied_lm.model.embedding import VocabularyModel


def _choose(logits_KxV: Float[Array, "K V"], key: Array, temperature: Float[Array, ""], top_k: int) -> Int[Array, "K"]:
    """A token for each sample, from softmax(logits / temperature) over the `top_k` likeliest."""
    best_Kxk, ids_Kxk = jax.lax.top_k(logits_KxV, top_k)
    # Relative to the best: a very small temperature then gives -inf for the others, and no NaN.
    relative_Kxk = (best_Kxk - best_Kxk[:, :1]) / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    chosen_K = jnp.where(temperature > 0, jax.random.categorical(key, relative_Kxk), 0)
    return jnp.take_along_axis(ids_Kxk, chosen_K[:, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("model", "length", "top_k", "window"))
def sample(
    model: VocabularyModel,
    params: PyTree,
    prompts: Int[Array, "K P"],
    length: int,
    key: Array,
    temperature: Float[Array, ""] | float = 1.0,
    top_k: int | None = None,
    window: int | None = None,
) -> Int[Array, "K T"]:
    """Continue each prompt by `length` tokens, to T = P + length.

    A body that carries state starts from zeros, at the first token of the window.

    Args:
        prompts: at least one token each; all of one length.
        temperature: 0 takes the likeliest token every time; of equals, the first.
        top_k: sample among so many of the likeliest tokens only; by default among all.
        window: each token is scored with so many of the tokens before it; by default with all. Positions count from
            the first one of these, so that a model meets none beyond the window.
    """
    count, start = prompts.shape
    buffer = jnp.zeros((count, start + length), jnp.int32).at[:, :start].set(prompts)
    fresh = jax.eval_shape(model.init, jax.random.key(0), prompts[:, :1]).get("carry", {})
    carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), fresh)
    variables = {"params": params} | ({"carry": carry} if carry else {})

    width = min(window or start + length, start + length - 1)

    def one(position: Int[Array, ""], buffer: Int[Array, "K T"]) -> Int[Array, "K T"]:
        before_KxW = jax.lax.dynamic_slice_in_dim(buffer, jnp.maximum(position - width, 0), width, axis=1)
        # A causal model does not see what is not written yet.
        (h_KxWxR, scoring_VxR), _ = model.apply(variables, before_KxW, method="hidden", mutable=["carry"])
        h_KxR = jax.lax.dynamic_index_in_dim(h_KxWxR, jnp.minimum(position, width) - 1, axis=1, keepdims=False)
        new_K = _choose(
            model.logits(h_KxR, scoring_VxR),
            jax.random.fold_in(key, position),
            jnp.asarray(temperature),
            top_k or model.vocab_size,
        )
        return buffer.at[:, position].set(new_K)

    return jax.lax.fori_loop(start, start + length, one, buffer)


def first_tokens(frequencies_V: Float[np.ndarray, "V"], count: int, key: Array) -> Int[Array, "K 1"]:
    """Prompts of one token, drawn by its frequency."""
    return jax.random.choice(key, frequencies_V.size, (count, 1), p=jnp.asarray(frequencies_V)).astype(jnp.int32)
