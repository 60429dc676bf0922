"""The programs that say how good a state is on held-out tokens, and what its rows are asked for there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from tied_lm.data.sources import Heldout
from tied_lm.data.stream import Batch
from tied_lm.model.likelihoods import likelihood
from tied_lm.model.split import Tables, backward, counts, part_norms, stats_of_tables, tables
from tied_lm.record.slots import Evaluation, Probe
from tied_lm.train.step import Trainer


def heldout_batch(heldout: Heldout, index: Int[Array, ""], tokens: int) -> Batch:
    """A held-out batch of which the mask leaves the first `tokens` target tokens of all batches."""
    batch = heldout.heldout(index)
    position = index * batch.mask.size + jnp.arange(batch.mask.size).reshape(batch.mask.shape)
    return batch._replace(mask=batch.mask & (position < tokens))


def _fresh_carry(trainer: Trainer) -> PyTree:
    """What the body starts from: zeros."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(trainer.init, 0).carry)


def _warm_carry(trainer: Trainer, params: PyTree, heldout: Heldout) -> PyTree:
    """What the body starts the held-out tokens from: the state that the window before them leads to."""
    carry = _fresh_carry(trainer)
    if not carry or heldout.warm_up is None:
        return carry
    variables = {"params": params, "carry": carry}
    return trainer.model.apply(variables, heldout.warm_up, method="hidden", mutable=["carry"])[1]["carry"]


def _batches(trainer: Trainer, tokens: int) -> int:
    return -(-tokens // (trainer.config.data.batch_size * trainer.config.data.length))


@functools.partial(jax.jit, static_argnames="trainer")
def hidden(
    trainer: Trainer, params: PyTree, heldout: Heldout
) -> tuple[Float[Array, "N D"], Float[Array, "V D"], Int[Array, "N"]]:
    """Hidden vectors of the first held-out batch, the matrix that scores them, and the targets."""
    batch = heldout.heldout(jnp.zeros((), jnp.int32))
    carry = _warm_carry(trainer, params, heldout)
    variables = {"params": params} | ({"carry": carry} if carry else {})
    with trainer.precision:
        (h, scoring_PxD), _ = trainer.model.apply(variables, batch.inputs, method="hidden", mutable=["carry"])
    return h.reshape(-1, h.shape[-1]), trainer.model.layout.cut(scoring_PxD), batch.targets.reshape(-1)


@functools.partial(jax.jit, static_argnames=("trainer", "tokens"))
def evaluate(trainer: Trainer, params: PyTree, heldout: Heldout, tokens: int) -> Evaluation:
    """Held-out loss over the first `tokens` held-out tokens. A state that a body carries is a warm one at them."""
    layout, params = trainer.model.layout, trainer.whole(params)

    def one(carry: PyTree, index: Int[Array, ""]) -> tuple[PyTree, Evaluation]:
        batch = layout.place_batch(heldout_batch(heldout, index, tokens))
        variables = {"params": params} | ({"carry": carry} if carry else {})
        (h, scoring_VxD), changed = trainer.model.apply(variables, batch.inputs, method="hidden", mutable=["carry"])
        targets_N, mask_N = batch.targets.reshape(-1), batch.mask.reshape(-1)
        nll_N, excess_N = likelihood(
            h.reshape(-1, h.shape[-1]),
            scoring_VxD,
            targets_N,
            soft_cap=trainer.model.logit_cap,
            compute_dtype=trainer.model.compute_dtype,
            law=heldout.law,
            contexts_N=batch.inputs.reshape(-1),
            block_tokens=trainer.model.block_tokens,
            layout=layout,
        )
        row_N = jnp.repeat(jnp.arange(batch.mask.shape[0]), batch.mask.shape[1])
        at = (row_N, trainer.bands[targets_N])
        zeros = jnp.zeros((batch.mask.shape[0], trainer.band_count))
        true_logp = heldout.log_likelihood(batch.inputs.reshape(-1), targets_N)
        sizes = heldout.byte_counts(targets_N)
        return changed.get("carry", {}), Evaluation(
            zeros.at[at].add(nll_N * mask_N),
            zeros.astype(jnp.int32).at[at].add(mask_N.astype(jnp.int32)),
            None if excess_N is None else zeros[:, 0].at[row_N].add(excess_N * mask_N),
            None if true_logp is None else zeros[:, 0].at[row_N].add(-true_logp * mask_N),
            None if sizes is None else zeros[:, 0].astype(jnp.int32).at[row_N].add(sizes * mask_N),
        )

    with trainer.precision:
        sums = jax.lax.scan(one, _warm_carry(trainer, params, heldout), jnp.arange(_batches(trainer, tokens)))[1]
    return layout.replicate(jax.tree.map(lambda of_batches: of_batches.reshape(-1, *of_batches.shape[2:]), sums))


@functools.partial(jax.jit, static_argnames=("trainer", "tokens"))
def probe(trainer: Trainer, params: PyTree, heldout: Heldout, tokens: int) -> Probe:
    """Row statistics of the gradient of what is trained, with its z-loss, over the first `tokens` held-out tokens."""
    layout, params = trainer.model.layout, trainer.whole(params)

    def one(index: Int[Array, ""], carry: tuple[Any, ...]) -> tuple[Any, ...]:
        batch = layout.place_batch(heldout_batch(heldout, index, tokens))
        z_loss = trainer.config.loss.z
        b = backward(trainer.model, params, batch.inputs, batch.targets, mask=batch.mask, carry=carry[3], z_loss=z_loss)
        weight = batch.mask.sum() / tokens
        sums = jax.tree.map(lambda total, new: total + weight * new, carry[0], tables(b))
        in_count, out_count = counts(b)
        return sums, carry[1] + in_count, carry[2] + out_count, b.carry

    zeros_VxD = jnp.zeros((layout.rows, trainer.model.row_width))
    none_V = jnp.zeros(layout.rows, jnp.int32)
    no_parts = dict.fromkeys(trainer.model.push_parts, zeros_VxD)
    no_tables = layout.place_rows(Tables(zeros_VxD, zeros_VxD, zeros_VxD, zeros_VxD, no_parts))
    with trainer.precision:
        start = (no_tables, none_V, none_V, _warm_carry(trainer, params, heldout))
        sums, in_count, out_count, _ = jax.lax.fori_loop(0, _batches(trainer, tokens), one, start)
    stats, parts = layout.cut((stats_of_tables(sums, in_count, out_count), part_norms(sums.push_parts)))
    return layout.replicate(Probe(stats, parts, out_count.sum()))
