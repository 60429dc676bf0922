"""What the runs of a study's comparisons left behind, as its function reads it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tied_lm.data.stream import Batch
from tied_lm.intervals import HeldoutEstimate
from tied_lm.model.geometry.predictions import Predictions
from tied_lm.record.reader import Run, open_run
from tied_lm.study.comparison import run_folder
from tied_lm.study.geometry import predictions_of
from tied_lm.study.plan import Plan
from tied_lm.study.summary import Summary
from tied_lm.train.checkpoint import Checkpoints
from tied_lm.train.evaluation import heldout_batch


class Missing(Exception):
    """An arm has no result."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """One comparison that is complete."""

    plan: Plan
    place: Path
    summary: Summary


class Results:
    """The comparisons of a study by name. Where one value for each seed is returned, the seeds are in order.

    Every method raises `Missing` where the arm diverged.
    """

    def __init__(self, compared: dict[str, Compared]):
        self.compared = compared
        self._params: dict[tuple[str, str, int, int | None], dict[str, Any]] = {}

    def _of(self, setting: str, arm: str) -> Compared:
        found = self.compared[setting]
        if arm in found.summary.diverged:
            raise Missing(f"{arm} diverged: {found.summary.diverged[arm].reason}")
        return found

    def runs(self, setting: str, arm: str) -> list[Run]:
        """One for each seed."""
        found = self._of(setting, arm)
        return [
            open_run(run_folder(found.place, arm, config))
            for name, config in found.plan.comparison.runs()
            if name == arm
        ]

    def seeds(self, setting: str) -> list[int]:
        return list(self.compared[setting].summary.seeds)

    def difference(self, setting: str, arm: str) -> HeldoutEstimate:
        """Held-out loss of an arm less that of the baseline at the last step, nats a token."""
        found = self._of(setting, arm)
        self._of(setting, found.summary.baseline)
        return found.summary.differences[arm]

    def losses(self, setting: str, arm: str) -> Float[np.ndarray, "S"]:
        """Held-out loss at the last step, nats a token."""
        return np.array(self._of(setting, arm).summary.arms[arm].eval_loss.per_seed, np.float64)

    def best_losses(self, setting: str, arm: str) -> Float[np.ndarray, "S"]:
        """The lowest held-out loss of all evaluations."""
        return np.array([min(run.scalars("loss/eval").values()) for run in self.runs(setting, arm)])

    def band_losses(self, setting: str, arm: str, band: str) -> Float[np.ndarray, "S"]:
        """Held-out loss of the tokens of a band."""
        loss = self._of(setting, arm).summary.arms[arm].bands[band].loss
        if loss is None:
            raise Missing(f"no held-out token is of band {band}")
        return np.array(loss.per_seed, np.float64)

    def parameters(self, setting: str, arm: str) -> int:
        return self._of(setting, arm).summary.arms[arm].parameters

    def frequencies(self, setting: str) -> Float[np.ndarray, "V"]:
        found = self.compared[setting]
        return found.plan.arms[found.summary.baseline].stream.frequencies

    def steps(self, setting: str, arm: str) -> list[int]:
        """Steps at which there are matrices, 0 among them."""
        run = self.runs(setting, arm)[0]
        checkpoints = Checkpoints(run.folder / "checkpoints", run.config.checkpoint.keep, read_only=True)
        return [0, *sorted(checkpoints.manager.all_steps())]

    def params(self, setting: str, arm: str, seed: int, step: int | None = None) -> dict[str, Any]:
        """All parameters of one run, on the host.

        Args:
            step: of a checkpoint, or 0; by default the last one.
        """
        key = setting, arm, seed, step
        if key not in self._params:
            found = self._of(setting, arm)
            trainer = found.plan.arms[arm].trainer
            state = trainer.init(np.uint32(seed))
            if step != 0:
                config = dataclasses.replace(found.plan.arms[arm].config, seed=seed)
                place = run_folder(found.place, arm, config) / "checkpoints"
                checkpoints = Checkpoints(place, config.checkpoint.keep, read_only=True)
                restored = checkpoints.restore(state, step=step, kept=trainer.kept(state))
                if restored is None:
                    raise Missing(f"{place} has no checkpoint")
                state = restored
            self._params[key] = trainer.to_host(state).params
        return self._params[key]

    def matrices(
        self, setting: str, arm: str, name: str = "embedding", step: int | None = None
    ) -> list[Float[np.ndarray, "V D"]]:
        """One vocabulary matrix of each seed."""
        return [np.asarray(self.params(setting, arm, seed, step)[name]) for seed in self.seeds(setting)]

    def batch(self, setting: str, arm: str) -> Batch:
        """The first held-out batch."""
        found = self._of(setting, arm)
        stream, config = found.plan.arms[arm].stream, found.plan.arms[arm].config
        tokens = config.data.batch_size * config.data.length
        return jax.device_get(heldout_batch(stream.heldout_ahead(tokens), jnp.zeros((), jnp.int32), tokens))

    def predictions(self, setting: str, arm: str) -> list[Predictions]:
        """What each seed's last state predicts on the first held-out batch."""
        arm_of = self._of(setting, arm).plan.arms[arm]
        return [
            predictions_of(arm_of.trainer, self.params(setting, arm, seed), arm_of.stream)
            for seed in self.seeds(setting)
        ]
