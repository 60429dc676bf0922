"""Somebody else's model in somebody else's loop, instrumented: the lines between the marks are all that was added."""

import threading
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from tied_lm.cli.command import Parser

VOCABULARY, FEATURES, LENGTH, BATCH, PARTS, STEPS = 64, 32, 16, 4, 2, 200


class Model(nn.Module):
    """A causal model of one attention layer, tied through `attend`."""

    @nn.compact
    def __call__(self, ids: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        embed = nn.Embed(VOCABULARY, FEATURES, name="token_embed")
        x = embed(ids) + nn.Embed(LENGTH, FEATURES, name="position_embed")(jnp.arange(LENGTH))
        x += nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=nn.make_causal_mask(ids))
        return embed.attend(nn.LayerNorm()(x))


def train(workdir: str) -> None:
    ranks = 1 / np.arange(1, VOCABULARY + 1)
    stream = np.random.default_rng(0).choice(VOCABULARY, (STEPS, PARTS, BATCH, LENGTH + 1), p=ranks / ranks.sum())
    stream[..., 1::2] = (stream[..., :-1:2] + 1) % VOCABULARY  # every other token can be known from the last
    model, optimizer = Model(), optax.adam(3e-3)
    params = model.init(jax.random.key(0), stream[0, 0, :, :-1])["params"]
    state = optimizer.init(params)

    # --- added
    from tied_lm import RowRecorder, embed_loss_and_parts

    counts = np.bincount(stream.ravel(), minlength=VOCABULARY)
    recorder = RowRecorder(workdir, VOCABULARY, counts=counts, first_step=0)
    # ---

    @jax.jit
    def step(params: Any, state: Any, microbatches: Array) -> Any:
        def of_one(tokens: Array) -> Any:
            ids, targets = tokens[:, :-1], tokens[:, 1:]

            def loss_fn(params: Any) -> Array:
                logits = model.apply({"params": params}, ids)
                return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

            # --- changed, from: return jax.value_and_grad(loss_fn)(params)
            table = "token_embed/embedding"
            return embed_loss_and_parts(loss_fn, params, table=table, tokens=targets.size, ids=ids, targets=targets)
            # ---

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_one, microbatches[0]))
        # --- changed, from: (loss, gradients), _ = ...
        (loss, gradients, parts), _ = jax.lax.scan(
            lambda sums, tokens: (jax.tree.map(jnp.add, sums, of_one(tokens)), None), zeros, microbatches
        )
        # ---
        loss, gradients = jax.tree.map(lambda x: x / PARTS, (loss, gradients))
        updates, state = optimizer.update(gradients, state)
        # --- added: parts.stats()
        return optax.apply_updates(params, updates), state, loss, parts.stats()
        # ---

    for k, tokens in enumerate(stream):
        params, state, loss, rows = step(params, state, tokens)
        # --- added
        if k % 10 == 0:
            recorder.record(k, rows, {"loss/train": loss})
    recorder.close()
    # ---

    print(f"loss {loss:.3f} nats a token after {STEPS} updates; TensorBoard and rows.zarr: {workdir}")


def main(arguments: list[str], _: threading.Event) -> None:
    parser = Parser(description="Train somebody else's model in somebody else's loop, recorded.", allow_abbrev=False)
    parser.add_argument("workdir", nargs="?", default="runs/instrument", help="default: %(default)s")
    train(parser.parse_args(arguments).workdir)
