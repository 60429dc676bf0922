"""The programs that say how good a state is on held-out tokens, and what its rows are asked for there."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from tied_lm.data.sources import Heldout
from tied_lm.data.stream import Batch
from tied_lm.model.geometry.predictions import Seen, look
from tied_lm.model.likelihoods import likelihood
from tied_lm.model.logits import matmul
from tied_lm.model.mesh import DATA, Layout
from tied_lm.model.split import Backward, Tables, backward, counts, part_norms, stats_of_tables, tables
from tied_lm.record.slots import Evaluation, Probe
from tied_lm.train.step import Trainer

PREDICTED = 2048  # held-out tokens for which it is told what is predicted, at most


class Scored(NamedTuple):
    """The first tokens of a probe."""

    h: Float[Array, "*T R"]
    matrix: Float[Array, "V R"]
    targets: Int[Array, "*T"]
    mask: Bool[Array, "*T"]

    @classmethod
    def empty(cls, trainer: Trainer, batches: int) -> "Scored":
        """Room for those of so many batches."""
        config, layout = trainer.config.data, trainer.model.layout
        shape, width = (batches, config.batch_size * config.length), trainer.model.row_width
        targets, mask = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)
        return cls(jnp.zeros((*shape, width)), layout.place_rows(jnp.zeros((layout.rows, width))), targets, mask)

    def put(self, index: Int[Array, ""], b: Backward) -> "Scored":
        """With those of a batch, if there is room for them."""
        new = {"h": b.scoring.h, "targets": b.scoring.targets, "mask": b.mask}
        kept = {name: getattr(self, name).at[index].set(values, mode="drop") for name, values in new.items()}
        return Scored(matrix=b.matrix, **kept)

    def first(self, tokens: int, devices: int) -> "Scored":
        """So many of the tokens in one row, filled up with masked ones to as many for each of the devices."""
        kept = -(-tokens // devices) * devices
        h_TxR, targets_T, mask_T = (x.reshape(-1, *x.shape[2:])[:kept] for x in (self.h, self.targets, self.mask))
        return Scored(h_TxR, self.matrix, targets_T, mask_T & (jnp.arange(kept) < tokens))


class Predicted(NamedTuple):
    """What is predicted at a probe."""

    seen: Seen  # in the directions of the columns of S, the matrix that scores
    gram: Float[Array, "R R"]  # S^T S


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
def probe(trainer: Trainer, params: PyTree, heldout: Heldout, tokens: int) -> tuple[Probe, Scored]:
    """Row statistics of the gradient of what is trained, with its z-loss, over the first `tokens` held-out tokens; and
    how the first of these are scored."""
    layout, params = trainer.model.layout, trainer.whole(params)

    def one(index: Int[Array, ""], carry: tuple[Any, ...]) -> tuple[Any, ...]:
        batch = layout.place_batch(heldout_batch(heldout, index, tokens))
        z_loss = trainer.config.loss.z
        b = backward(trainer.model, params, batch.inputs, batch.targets, mask=batch.mask, carry=carry[3], z_loss=z_loss)
        weight = batch.mask.sum() / tokens
        sums = jax.tree.map(lambda total, new: total + weight * new, carry[0], tables(b))
        in_count, out_count = counts(b)
        return sums, carry[1] + in_count, carry[2] + out_count, b.carry, carry[4].put(index, b)

    zeros_VxD = jnp.zeros((layout.rows, trainer.model.row_width))
    none_V = jnp.zeros(layout.rows, jnp.int32)
    no_parts = dict.fromkeys(trainer.model.push_parts, zeros_VxD)
    no_tables = layout.place_rows(Tables(zeros_VxD, zeros_VxD, zeros_VxD, zeros_VxD, no_parts))
    wanted = min(tokens, PREDICTED)
    with trainer.precision:
        no_tokens = Scored.empty(trainer, _batches(trainer, wanted))
        start = (no_tables, none_V, none_V, _warm_carry(trainer, params, heldout), no_tokens)
        sums, in_count, out_count, _, scored = jax.lax.fori_loop(0, _batches(trainer, tokens), one, start)
    stats, parts = layout.cut((stats_of_tables(sums, in_count, out_count), part_norms(sums.push_parts)))
    devices = 1 if layout.mesh is None else layout.mesh.shape[DATA]
    return layout.replicate(Probe(stats, parts, out_count.sum())), scored.first(wanted, devices)


def predict(trainer: Trainer, scored: Scored) -> Predicted:
    """What is predicted of tokens, with logits in float32 whatever the model has."""
    model = trainer.model
    return _predict(model.logit_cap, model.block_tokens, model.layout, scored)


# Not of a trainer, so that arms whose arrays have the same shapes share it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _predict(soft_cap: float | None, block_tokens: int, layout: Layout, scored: Scored) -> Predicted:
    seen = look(*scored, soft_cap=soft_cap, block_tokens=block_tokens, layout=layout)
    gram_DxD = matmul(scored.matrix, scored.matrix, (0, 0))
    return layout.replicate(Predicted(seen._replace(probability=layout.cut(seen.probability)), gram_DxD))
