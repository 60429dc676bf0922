"""Orbax checkpoints of the training state, each with its config and a digest of its values."""

import contextlib
import gc
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from tied_lm.checks import ConfigError, choose
from tied_lm.config import differing_fields
from tied_lm.files import Damaged, refused
from tied_lm.train.digest import digests
from tied_lm.train.processes import several, what_any_says
from tied_lm.train.step import TrainState

METRIC = "loss/eval"
Found = tuple[TrainState, Any]  # and the digests that it is to have


def _of_old(state: TrainState, kept: TrainState) -> str:
    """SHA-256 of all values, which older versions kept instead of `digests`."""
    sha = hashlib.sha256()
    if not all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(state)):
        raise ConfigError("mesh.distributed", True, "False up to the next checkpoint: this one is of an older version")
    for (path, leaf), shape in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(kept), strict=True):
        array = np.asarray(leaf)[tuple(map(slice, shape.shape))]
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def _is_spread(state: TrainState) -> bool:
    """Whether its arrays lie on several devices."""
    return len(state.step.sharding.device_set) > 1


def _padded_rows(state: TrainState, kept: TrainState) -> int | None:
    """The number of rows with padding, where there is padding."""
    shapes = zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True)
    return next((leaf.shape[0] for leaf, true in shapes if leaf.shape != true.shape), None)


def _reason(error: Exception) -> str:
    """An error in one short line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """When a read or write fails, Orbax drops the others, whose complaints would bury the message that matters."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _drop() -> None:
    """Let what was dropped complain now."""
    time.sleep(0.3)
    gc.collect()


def _needs_attention(record: logging.LogRecord) -> bool:
    """Orbax tells of each save at length, and warns of what is meant so: not for the user, unlike what is left. The
    error of a save comes out of `wait`, without its traceback."""
    if "/orbax/" not in record.pathname:
        return True
    message = record.getMessage()
    meant = "did not provide metrics" in message or "is read only" in message
    return record.levelno >= logging.WARNING and not meant and record.exc_info is None


def _alone() -> ocp.options.MultiprocessingOptions:
    """For one of several processes that reads by itself: it waits for no other."""
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})


def _manager(folder: Path, keep: int, read_only: bool) -> ocp.CheckpointManager:
    """Of the checkpoints in a folder; all processes do each of its calls, but if it only reads.

    Raises:
        Damaged: one has unreadable metrics.
    """
    best = policies.BestN(
        get_metric_fn=lambda metrics: metrics[METRIC], reverse=True, n=1, keep_checkpoints_without_metrics=False
    )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        best_fn=lambda metrics: metrics[METRIC],
        best_mode="min",
        cleanup_tmp_directories=not read_only,
        create=not read_only,
        read_only=read_only,
        save_interval_steps=0 if read_only else 1,
        multiprocessing_options=_alone() if read_only else ocp.options.MultiprocessingOptions(),
    )
    try:
        return ocp.CheckpointManager(folder, options=options)
    except ValueError as error:  # of JSON or UTF-8: Orbax reads the metrics of every checkpoint
        raise Damaged(
            f"a checkpoint in {folder} has unreadable metrics ({_reason(error)}); "
            "remove the run's folder to start again"
        ) from error


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, and the one with the lowest held-out loss."""

    def __init__(self, folder: Path, keep: int, read_only: bool = False):
        """
        Args:
            keep: how many of the newest are kept, besides the best.
            read_only: nothing is written or tidied up there, so that a run that is still training is not disturbed; of
                several processes that train together one may do it alone. Else all of them do each call.
        """
        logging.getLogger("absl").addFilter(_needs_attention)
        self.folder = folder.absolute()
        self.manager = _manager(self.folder, keep, read_only)
        # What one process fails to read it tells the others itself: they would wait for it in Orbax.
        self.reads_alone = read_only or not several()

    def save(
        self, state: TrainState, config: dict[str, Any], loss: float | None, kept: TrainState | None = None
    ) -> None:
        """Start to save; the values are copied, so the state may be donated as soon as this returns.

        Each process saves the parts that it has, so all of them call this; about the rest the first sees.

        Args:
            loss: held-out loss in nats, if it was measured at this step.
            kept: the shapes of the arrays without padding, where they have any.
        """
        kept, step = state if kept is None else kept, int(state.step)
        # Of one device it takes fewer files so.
        values = state if _is_spread(state) else jax.device_get(state)
        about = {"config": config, "digests": digests(values, kept), "padded_rows": _padded_rows(state, kept)}
        with self._writing():
            saved = self.manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(values), about=ocp.args.JsonSave(about)),
                metrics=None if loss is None else {METRIC: loss},
            )
        if not saved:
            raise RuntimeError(f"the checkpoint of step {step} was not saved in {self.folder}")

    def latest(self) -> int | None:
        """The step of the newest one; None where there is none."""
        return self.manager.latest_step()

    def find(self, which: str) -> int:
        """The step of a checkpoint that is named by its number, as `last`, or as `best` (of the lowest held-out loss).

        Raises:
            ConfigError: there is none of that name.
        """
        steps = sorted(self.manager.all_steps())
        named = {str(step): step for step in steps}
        if steps:
            named["last"] = steps[-1]
        best = self.manager.best_step()
        if best is not None:
            named["best"] = best
        if not named:
            raise ConfigError("step", which, f"a run with checkpoints; there is none in {self.folder}")
        return choose(named, "step", which)

    def restore(
        self,
        like: TrainState,
        *,
        step: int | None = None,
        config: Mapping[str, Any] | None = None,
        kept: TrainState | None = None,
    ) -> TrainState | None:
        """The state of a step, by default of the newest; None where there is none.

        Args:
            like: a state of the structure that it has, its arrays on the devices where it is to be.
            kept: the shapes of its arrays without padding. The checkpoint may have other padding, or none.
            config: what the checkpoint is to be of.

        Raises:
            ConfigError: it is of another config; the fields are named.
            Damaged: the checkpoint is incomplete, has other shapes or types, or its values have changed.
        """
        kept = like if kept is None else kept
        step = self.manager.latest_step() if step is None else step
        if step is None:
            return None
        place = self.folder / str(step)
        older = [s for s in self.manager.all_steps() if s < step]
        remedy = (
            f"remove that folder to continue from step {max(older)}"
            if older
            else "remove the run's folder to start again"
        )
        read = partial(self._read, place, remedy, like, config, kept)
        state, expected = read(self.manager) if self.reads_alone else self._in_all(read)
        types = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
        if types != [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(like)] or expected != (
            digests(state, kept) if isinstance(expected, dict) else _of_old(state, kept)
        ):
            raise Damaged(f"the checkpoint {place} is damaged (its values are not those that were saved); {remedy}")
        if _is_spread(like):
            return state
        # As a new state is: not committed to a device, or each program would be compiled for it once more.
        return jax.tree.map(jnp.asarray, jax.device_get(state))

    def _in_all(self, read: Callable[[ocp.CheckpointManager], Found]) -> Found:
        """What each of several processes reads; what one of them cannot read is an error in all."""
        failed: ConfigError | Damaged | None = None
        try:
            with contextlib.closing(_manager(self.folder, 1, read_only=True)) as manager:
                found = read(manager)
        except (ConfigError, Damaged) as error:
            failed = error
        said = what_any_says(str(failed or ""))
        if failed or said:
            raise failed or Damaged(said)
        return found

    def _read(
        self,
        place: Path,
        remedy: str,
        like: TrainState,
        config: Mapping[str, Any] | None,
        kept: TrainState,
        manager: ocp.CheckpointManager,
    ) -> Found:
        step, reason = int(place.name), None
        with _unheard():
            try:
                about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
                if config is not None:
                    self._compare(step, config, about["config"])
                expected = about["digests"] if "digests" in about else about["sha256"]
                same_rows = about.get("padded_rows") == _padded_rows(like, kept)
                if about.get("phase") == 0 and about["config"]["model"]["tying"] == "late_untie":
                    raise Damaged(
                        f"the checkpoint {place} is of a version that kept one matrix up to scheme.untie_step, and two "
                        "are expected; take one of a later step, or remove the run's folder to start again"
                    )
                # Not strict, Orbax cuts rows, or adds zeros; what is V then is seen by the digests.
                how = ocp.args.StandardRestore(like, strict=same_rows)
                state = manager.restore(step, args=ocp.args.Composite(state=how))["state"]
            except (ConfigError, Damaged):
                raise
            except Exception as error:  # Orbax raises bare exceptions for truncated files
                reason = _reason(error)
            if reason:
                _drop()
        if reason:
            raise Damaged(f"the checkpoint {place} is damaged ({reason}); {remedy}")
        return state, expected

    def _compare(self, step: int, config: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        differences = differing_fields(config, saved)
        if differences:
            allowed = f"checkpoints of the run's config; that of step {step} has {'; '.join(differences)}"
            raise ConfigError("checkpoints", str(self.folder), allowed)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """An error of a save as one that names the folder: here, in a call that comes after it, all kinds come out."""
        failed: OSError | None = None
        with _unheard():
            try:
                yield
            except Exception as error:
                reason = f"the checkpoints in {self.folder} cannot be written ({_reason(error)})"
                failed = refused(self.folder, error) or OSError(reason)
            if failed:
                _drop()
        if failed:
            raise failed

    def wait(self) -> None:
        """Wait for saves under way.

        Raises:
            OSError: one of them failed.
        """
        with self._writing():
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait for saves under way; an error in one is raised here."""
        self.wait()
        self.manager.close()
