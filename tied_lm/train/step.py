"""The state of a run, and the program that updates it on the device."""

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree, UInt32

from tied_lm.checks import ConfigError
from tied_lm.config import Config
from tied_lm.data.sources import Ahead
from tied_lm.data.stream import Batch, named_key
from tied_lm.model.embedding import Params
from tied_lm.model.mesh import DATA
from tied_lm.model.split import (
    Backward,
    backward,
    part_norms,
    stats_of,
    sum_rule_residual,
)
from tied_lm.record.histogram import log_histogram
from tied_lm.record.slots import Record, Records, pack
from tied_lm.rows import PARTS, row_norm
from tied_lm.train import optimizer
from tied_lm.train.build import build_model


class Window(NamedTuple):
    """Sums over the updates since the last record of the training loss."""

    loss: Float[Array, ""]
    clipped: Int[Array, ""]
    updates: Int[Array, ""]

    @classmethod
    def empty(cls) -> "Window":
        """The sums before the first update."""
        return cls(jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


@flax.struct.dataclass
class TrainState:
    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    window: Window
    seed: UInt32[Array, ""]  # of dropout
    carry: PyTree  # the state that the body hands to the next batch, B first; {} if it is of a kind that does not


def _programs_of(config: Config) -> Config:
    """What of a config the programs hold: seed and hyperparameters are their arguments, and records never enter."""
    plain = Config()
    return dataclasses.replace(
        config,
        seed=plain.seed,
        data=dataclasses.replace(config.data, seed=plain.data.seed),
        optimizer=optimizer.switches(config.optimizer),
        train=dataclasses.replace(plain.train, steps=config.train.steps),
        log=plain.log,
        checkpoint=plain.checkpoint,
        mesh=dataclasses.replace(plain.mesh, body=config.mesh.body),
    )


class Trainer:
    """The compiled programs of one arm. They serve every seed, so each is compiled once; and every arm that differs in
    nothing but hyperparameters, to which this trainer is equal."""

    def __init__(self, config: Config, frequency_bands: Int[np.ndarray, "V"], mesh: Mesh | None = None):
        """
        Args:
            mesh: the devices that train; of the config's group of this name `body` alone is asked. By default one.

        Raises:
            ConfigError: of `build_model`; or nothing of the body can be in parts.
        """
        self.config = config
        self.model = build_model(config, frequency_bands.tolist(), mesh)
        self.values = optimizer.Hyperparameters.of(config.optimizer).as_arguments()
        self.optimizer = self._optimizer()
        self.programs = (_programs_of(config), frequency_bands.tobytes(), mesh)
        self.bands = jnp.asarray(frequency_bands)
        self.band_count = int(frequency_bands.max()) + 1
        # Records held on the device in one dispatch: few for large vocabularies, to bound their memory.
        self.slots = max(1, min(128, 2**18 // config.data.vocab_size))
        self.body_in_parts = mesh is not None and config.mesh.body == "sharded"
        if mesh is not None and self.body_in_parts:
            specs = jax.tree.leaves(self.specs(jax.eval_shape(self.init, 0).params).get("body", {}))
            if specs and not any(DATA in spec for spec in specs):
                allowed = f"replicated, unless a width of the body is a multiple of mesh.data = {mesh.shape[DATA]}"
                raise ConfigError("mesh.body", "sharded", allowed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trainer) and self.programs == other.programs

    def __hash__(self) -> int:
        return hash(self.programs)

    def _optimizer(self, values: optimizer.Hyperparameters | None = None) -> optax.GradientTransformation:
        config, names = self.config, (self.model.vocabulary, self.model.scoring_vocabulary)
        return optimizer.build(config.optimizer, config.train.steps, *names, values, config.data.vocab_size)

    @property
    def has_sum_rule(self) -> bool:
        """Whether the rows of `scoring` sum to 0: each softmax does, the gradient of a z-loss does not."""
        return not self.model.no_sum_rule and not self.config.loss.z

    @property
    def stateful(self) -> bool:
        """Whether the body carries a state from batch to batch."""
        return bool(jax.eval_shape(self.init, 0).carry)

    @property
    def precision(self) -> contextlib.AbstractContextManager[None]:
        """In which all products are as precise as the config says."""
        if self.config.model.matmul_precision == "fast":
            return jax.default_matmul_precision("default")
        # A CPU's are exact, and to ask for that would have the compiler round the sums around them otherwise.
        is_exact = jax.default_backend() == "cpu"
        return contextlib.nullcontext() if is_exact else jax.default_matmul_precision("highest")

    def specs(self, state: PyTree) -> PyTree:
        """How the arrays of a state, or of a part of it, are shared out over the devices."""
        return self.model.layout.specs(state, self.model.vocabulary, self.body_in_parts)

    def whole(self, params: Params) -> Params:
        """The parameters as a model takes them: each device has all of the body."""
        return params | {"body": self.model.layout.replicate(params["body"])} if self.body_in_parts else params

    def kept(self, state: TrainState) -> TrainState:
        """The shapes of what a state keeps: V rows, whatever the devices."""
        return self.model.layout.kept(state, self.specs(state))

    def to_host(self, state: TrainState) -> TrainState:
        """The values of a state that this process can see whole, without padding."""
        shapes = jax.tree.map(lambda leaf: tuple(map(slice, leaf.shape)), self.kept(state))
        return jax.tree.map(lambda leaf, shape: leaf[shape], jax.device_get(state), shapes)

    def _place(self, state: TrainState) -> TrainState:
        return self.model.layout.place(state, self.specs(state))

    @functools.partial(jax.jit, static_argnames="self")
    def init(self, seed: int | Integer[Array, ""]) -> TrainState:
        """The state after 0 updates. Its values depend on the seed and the model alone."""
        ids = jnp.zeros((self.config.data.batch_size, 1), jnp.int32)
        variables = self.model.init(named_key(seed, "init"), ids)
        params, step = variables["params"], jnp.zeros((), jnp.int32)
        return self._place(
            TrainState(
                step,
                params,
                self.optimizer.init(params),
                Window.empty(),
                jnp.asarray(seed, jnp.uint32),
                variables.get("carry", {}),
            )
        )

    def advance(
        self,
        state: TrainState,
        ahead: Ahead,
        updates: np.int32,
        record_at: Int[np.ndarray, "S"],
        new_window: bool,
    ) -> tuple[TrainState, Records]:
        """Do some updates in one dispatch; their number is traced, so that no number recompiles.

        Args:
            ahead: the stream's, of these steps.
            record_at: steps whose update is recorded, in order, one for each slot; -1 in slots that stay empty.
            new_window: whether the window starts afresh.

        The record is made beside the update and never changes it: a run has the same bits with and without. The state
        is donated.
        """
        return self._advance(self.values, state, ahead, updates, record_at, new_window)

    def peak_bytes(self, ahead: Ahead) -> int | None:
        """Memory of the device that the updates of `ahead` take at most, with state and records, as they are compiled;
        None where the compiler does not tell. Nothing runs, and a program that is compiled is not compiled again."""
        state, record_at = jax.eval_shape(self.init, 0), np.full(self.slots, -1, np.int32)
        lowered = Trainer._advance.lower(self, self.values, state, ahead, np.int32(1), record_at, True)
        found = lowered.compile().memory_analysis()
        if found is None:
            return None
        passed_on = found.output_size_in_bytes - found.alias_size_in_bytes
        return int(found.argument_size_in_bytes + passed_on + found.temp_size_in_bytes)

    @functools.partial(jax.jit, static_argnames="self", donate_argnames="state")
    def _advance(
        self,
        values: optimizer.Hyperparameters,
        state: TrainState,
        ahead: Ahead,
        updates: Int[Array, ""],
        record_at: Int[Array, "S"],
        new_window: bool | Bool[Array, ""],
    ) -> tuple[TrainState, Records]:
        rule = self._optimizer(values)
        started = jax.tree.map(lambda fresh, old: jnp.where(new_window, fresh, old), Window.empty(), state.window)
        state = dataclasses.replace(state, window=started)
        # One slot more, into which what is not recorded goes: a branch that passed the slots on would copy them all.
        records = Records.empty(self.slots + 1, self.model)
        nothing = jax.tree.map(lambda slots: slots[0], records)

        def one(_: Int[Array, ""], carry: tuple[TrainState, Records, Array]) -> tuple[TrainState, Records, Array]:
            state, records, used = carry
            new, b, changes = self._update(rule, values, state, ahead.batch(state.step))
            wanted = record_at[used] == state.step  # the next one, since they are in order
            # A branch, since to observe costs as much as a small update does.
            found = jax.lax.cond(wanted, lambda: self._observe(state, b, changes), lambda: nothing)
            return new, records.write(jnp.where(wanted, used, self.slots), found), used + wanted

        with self.precision:
            state, records, _ = jax.lax.fori_loop(0, updates, one, (state, records, jnp.zeros((), jnp.int32)))
        return state, self.model.layout.replicate(records)

    def _update(
        self,
        rule: optax.GradientTransformation,
        values: optimizer.Hyperparameters,
        state: TrainState,
        batch: Batch,
    ) -> tuple[TrainState, Backward, Params]:
        """The state after one update, and how it came about: the backward pass, and the changes of the parameters."""
        batch = self.model.layout.place_batch(batch)
        # A sequence that does not go on from that of the last batch has nothing before it.
        body_carry = jax.tree.map(
            lambda leaf: jnp.where(batch.fresh.reshape(-1, *(1,) * (leaf.ndim - 1)), 0, leaf), state.carry
        )
        # From the seed and the step alone, so that a run that goes on draws what it would have drawn.
        rngs = {"dropout": jax.random.fold_in(named_key(state.seed, "dropout"), state.step)}
        b = backward(
            self.model,
            self.whole(state.params),
            batch.inputs,
            batch.targets,
            mask=batch.mask,
            rngs=rngs,
            carry=body_carry,
            step=state.step,
            train=True,
            z_loss=self.config.loss.z,
        )
        changes, opt_state = rule.update(b.gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        changes, params, opt_state = self.model.share((changes, params, opt_state), state.step)
        sums = state.window
        window = Window(sums.loss + b.loss, sums.clipped + self._is_clipped(b, values.clip_norm), sums.updates + 1)
        new = TrainState(state.step + 1, params, opt_state, window, state.seed, b.carry)
        return self._place(new), b, changes

    def _observe(self, state: TrainState, b: Backward, changes: Params) -> Records:
        """The record of an update, from the state before it."""
        cut, vocabulary = self.model.layout.cut, self.model.vocabulary
        stats = cut(stats_of(b, self.model.layout))
        return pack(
            Record(
                stats,
                cut(part_norms(b.scoring.push_parts)),
                {name: cut(row_norm(changes[name])) for name in vocabulary},
                {name: cut(row_norm(state.params[name])) for name in vocabulary},
                {
                    name: jnp.stack([jnp.linalg.norm(use[name].ravel()) for use in b.others])
                    for name in self.model.others
                },
                jnp.stack([log_histogram(getattr(stats, part)) for part in PARTS]),
                sum_rule_residual(self.model, b, state.step),
            )
        )

    def _is_clipped(self, b: Backward, limit: optimizer.Number) -> Int[Array, ""]:
        if not self.config.optimizer.clip_norm:
            return jnp.zeros((), jnp.int32)
        return (optax.tree.norm(b.gradients) > limit).astype(jnp.int32)
