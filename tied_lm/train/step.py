"""State, step, and the programs that run on the device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree, UInt32

from tied_lm.config import Config
from tied_lm.data.sources import Ahead, Heldout
from tied_lm.data.stream import Batch, named_key
from tied_lm.model.embedding import count_parameters
from tied_lm.model.loss import likelihood
from tied_lm.model.split import (
    Backward,
    Tables,
    backward,
    counts,
    part_norms,
    stats_of,
    stats_of_tables,
    sum_rule_residual,
    tables,
)
from tied_lm.record.histogram import log_histogram
from tied_lm.record.slots import Evaluation, Probe, Record, Records, pack
from tied_lm.rows import PARTS, row_norm
from tied_lm.train import optimizer
from tied_lm.train.build import build_model


class Window(NamedTuple):
    """Sums over the updates since the last record of the training loss."""

    loss: Float[Array, ""]
    clipped: Int[Array, ""]
    updates: Int[Array, ""]


@flax.struct.dataclass
class TrainState:
    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    window: Window
    seed: UInt32[Array, ""]  # of dropout
    carry: PyTree  # the state that the body hands to the next batch, B first; {} if it is of a kind that does not


def heldout_batch(heldout: Heldout, index: Int[Array, ""], tokens: int) -> Batch:
    """A held-out batch of which the mask leaves the first `tokens` target tokens of all batches."""
    batch = heldout.heldout(index)
    position = index * batch.mask.size + jnp.arange(batch.mask.size).reshape(batch.mask.shape)
    return batch._replace(mask=batch.mask & (position < tokens))


class Trainer:
    """The compiled programs of one arm. They serve every seed, so each is compiled once."""

    def __init__(self, config: Config, frequency_bands: Int[np.ndarray, "V"]):
        self.config = config
        self.model = build_model(config, frequency_bands.tolist())
        names = self.model.vocabulary, self.model.scoring_vocabulary
        self.optimizer = optimizer.build(config.optimizer, config.train.steps, *names)
        self.bands = jnp.asarray(frequency_bands)
        self.band_count = int(frequency_bands.max()) + 1
        # Records held on the device in one dispatch: few for large vocabularies, to bound their memory.
        self.slots = max(1, min(128, 2**18 // config.data.vocab_size))

    @property
    def stateful(self) -> bool:
        """Whether the body carries a state from batch to batch."""
        return bool(jax.eval_shape(self.init, 0).carry)

    @functools.partial(jax.jit, static_argnames="self")
    def init(self, seed: int | Integer[Array, ""]) -> TrainState:
        """The state after 0 updates. Its values depend on the seed and the model alone."""
        ids = jnp.zeros((self.config.data.batch_size, 1), jnp.int32)
        variables = self.model.init(named_key(seed, "init"), ids)
        params, step = variables["params"], jnp.zeros((), jnp.int32)
        return TrainState(
            step,
            params,
            self.optimizer.init(params),
            self._empty_window(),
            jnp.asarray(seed, jnp.uint32),
            variables.get("carry", {}),
        )

    def _fresh_carry(self) -> PyTree:
        """What the body starts from: zeros."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(self.init, 0).carry)

    def _warm_carry(self, params: PyTree, heldout: Heldout) -> PyTree:
        """What the body starts the held-out tokens from: the state that the window before them leads to."""
        carry = self._fresh_carry()
        if not carry or heldout.warm_up is None:
            return carry
        variables = {"params": params, "carry": carry}
        return self.model.apply(variables, heldout.warm_up, method="hidden", mutable=["carry"])[1]["carry"]

    @staticmethod
    def _empty_window() -> Window:
        return Window(jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    @functools.partial(jax.jit, static_argnames="self", donate_argnames="state")
    def advance(
        self,
        state: TrainState,
        ahead: Ahead,
        updates: Int[Array, ""],
        record_at: Int[Array, "S"],
        new_window: bool | Bool[Array, ""],
    ) -> tuple[TrainState, Records]:
        """Do some updates in one dispatch; their number is traced, so that no number recompiles.

        Args:
            ahead: the stream's, of these steps.
            record_at: steps whose update is recorded, in order, one for each slot; -1 in slots that stay empty.
            new_window: whether the window starts afresh.

        The record is made beside the update and never changes it: a run has the same bits with and without.
        """
        empty = self._empty_window()
        state = dataclasses.replace(
            state, window=jax.tree.map(lambda a, b: jnp.where(new_window, a, b), empty, state.window)
        )
        dropout_key, vocabulary = named_key(state.seed, "dropout"), self.model.vocabulary
        # One slot more, into which what is not recorded goes: a branch that passed the slots on would copy them all.
        records = Records.empty(self.slots + 1, self.model)
        nothing = jax.tree.map(lambda slots: slots[0], records)

        def one(_: Int[Array, ""], carry: tuple[TrainState, Records, Array]) -> tuple[TrainState, Records, Array]:
            state, records, used = carry
            batch = ahead.batch(state.step)
            body_carry = jax.tree.map(
                lambda leaf: jnp.where(batch.fresh.reshape(-1, *(1,) * (leaf.ndim - 1)), 0, leaf), state.carry
            )
            rngs = {"dropout": jax.random.fold_in(dropout_key, state.step)}
            b = backward(
                self.model,
                state.params,
                batch.inputs,
                batch.targets,
                mask=batch.mask,
                rngs=rngs,
                carry=body_carry,
                step=state.step,
                train=True,
            )
            changes, opt_state = self.optimizer.update(b.gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)
            changes, params, opt_state = self.model.share((changes, params, opt_state), state.step)

            def record() -> Records:
                stats = stats_of(b)
                return pack(
                    Record(
                        stats,
                        part_norms(b.scoring.push_parts),
                        {name: row_norm(changes[name]) for name in vocabulary},
                        {name: row_norm(state.params[name]) for name in vocabulary},
                        {
                            name: jnp.stack([jnp.linalg.norm(gradients[name].ravel()) for gradients in b.others])
                            for name in self.model.others
                        },
                        jnp.stack([log_histogram(getattr(stats, part)) for part in PARTS]),
                        sum_rule_residual(self.model, b, state.step),
                    )
                )

            wanted = record_at[used] == state.step  # the next one, since they are in order
            records = records.write(jnp.where(wanted, used, self.slots), jax.lax.cond(wanted, record, lambda: nothing))
            window = Window(
                state.window.loss + b.loss,
                state.window.clipped + self._is_clipped(b),
                state.window.updates + 1,
            )
            state = TrainState(state.step + 1, params, opt_state, window, state.seed, b.carry)
            return state, records, used + wanted

        state, records, _ = jax.lax.fori_loop(0, updates, one, (state, records, jnp.zeros((), jnp.int32)))
        return state, records

    def _is_clipped(self, b: Backward) -> Int[Array, ""]:
        limit = self.config.optimizer.clip_norm
        if not limit:
            return jnp.zeros((), jnp.int32)
        return (optax.tree.norm(b.gradients) > limit).astype(jnp.int32)

    def _batches(self, tokens: int) -> int:
        return -(-tokens // (self.config.data.batch_size * self.config.data.length))

    @functools.partial(jax.jit, static_argnames=("self", "tokens"))
    def evaluate(self, params: PyTree, heldout: Heldout, tokens: int) -> Evaluation:
        """Held-out loss over the first `tokens` held-out tokens. A state that a body carries is a warm one at them."""

        def one(carry: PyTree, index: Int[Array, ""]) -> tuple[PyTree, Evaluation]:
            batch = heldout_batch(heldout, index, tokens)
            variables = {"params": params} | ({"carry": carry} if carry else {})
            (h, scoring_VxD), changed = self.model.apply(variables, batch.inputs, method="hidden", mutable=["carry"])
            targets_N, mask_N = batch.targets.reshape(-1), batch.mask.reshape(-1)
            nll_N, excess_N = likelihood(
                h.reshape(-1, h.shape[-1]),
                scoring_VxD,
                targets_N,
                soft_cap=self.model.logit_cap,
                compute_dtype=self.model.compute_dtype,
                law=heldout.law,
                contexts_N=batch.inputs.reshape(-1),
            )
            row_N = jnp.repeat(jnp.arange(batch.mask.shape[0]), batch.mask.shape[1])
            at = (row_N, self.bands[targets_N])
            zeros = jnp.zeros((batch.mask.shape[0], self.band_count))
            true_logp = heldout.log_likelihood(batch.inputs.reshape(-1), targets_N)
            sizes = heldout.byte_counts(targets_N)
            return changed.get("carry", {}), Evaluation(
                zeros.at[at].add(nll_N * mask_N),
                zeros.astype(jnp.int32).at[at].add(mask_N.astype(jnp.int32)),
                None if excess_N is None else zeros[:, 0].at[row_N].add(excess_N * mask_N),
                None if true_logp is None else zeros[:, 0].at[row_N].add(-true_logp * mask_N),
                None if sizes is None else zeros[:, 0].astype(jnp.int32).at[row_N].add(sizes * mask_N),
            )

        sums = jax.lax.scan(one, self._warm_carry(params, heldout), jnp.arange(self._batches(tokens)))[1]
        return jax.tree.map(lambda of_batches: of_batches.reshape(-1, *of_batches.shape[2:]), sums)

    @functools.partial(jax.jit, static_argnames=("self", "tokens"))
    def probe(self, params: PyTree, heldout: Heldout, tokens: int) -> Probe:
        """Row statistics of the gradient of the mean loss over the first `tokens` held-out tokens."""

        def one(index: Int[Array, ""], carry: tuple[Any, ...]) -> tuple[Any, ...]:
            batch = heldout_batch(heldout, index, tokens)
            b = backward(self.model, params, batch.inputs, batch.targets, mask=batch.mask, carry=carry[3])
            weight = batch.mask.sum() / tokens
            sums = jax.tree.map(lambda total, new: total + weight * new, carry[0], tables(b))
            in_count, out_count = counts(b)
            return sums, carry[1] + in_count, carry[2] + out_count, b.carry

        zeros_VxD = jnp.zeros((self.model.vocab_size, self.model.row_width))
        none_V = jnp.zeros(self.model.vocab_size, jnp.int32)
        no_parts = dict.fromkeys(self.model.push_parts, zeros_VxD)
        no_tables = Tables(zeros_VxD, zeros_VxD, zeros_VxD, zeros_VxD, no_parts)
        start = (no_tables, none_V, none_V, self._warm_carry(params, heldout))
        sums, in_count, out_count, _ = jax.lax.fori_loop(0, self._batches(tokens), one, start)
        return Probe(stats_of_tables(sums, in_count, out_count), part_norms(sums.push_parts), out_count.sum())

    def account(self) -> dict[str, int]:
        """Numbers of parameters, and the bytes of the parameters and of the optimizer's state."""
        state = jax.eval_shape(self.init, 0)

        def size(tree: PyTree) -> int:
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

        return count_parameters(self.model) | {
            "parameter_bytes": size(state.params),
            "optimizer_bytes": size(state.opt_state),
        }
