"""One run in its folder: resume, train, write down."""

import bisect
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from tied_lm import bands
from tied_lm.config import VERSION, Config, folder, to_dict
from tied_lm.data.sources import Stream
from tied_lm.files import write_json
from tied_lm.model.embedding import Params
from tied_lm.record.background import Background
from tied_lm.record.rowtags import Rows
from tied_lm.record.runrecorder import RunRecorder
from tied_lm.record.scalars import is_finished
from tied_lm.record.slots import Evaluation, Geometry, Probe, Record, Records
from tied_lm.train import evaluation as programs
from tied_lm.train.calendar import Schedule
from tied_lm.train.checkpoint import METRIC, Checkpoints
from tied_lm.train.clock import Clock
from tied_lm.train.geometry import Measure, whole
from tied_lm.train.interrupts import stopped_by_interrupt
from tied_lm.train.processes import Agreement, from_first, is_first, several
from tied_lm.train.step import Trainer, Window

DISPATCH_SECONDS = 0.25  # long enough to hide the host's work, short enough to stop soon and to show progress
FLUSH_SECONDS = 10.0
WAITING_RECORDS = 8


class Interrupted(Exception):
    """The run was asked to stop, and did so with everything saved."""


class Diverged(RuntimeError):
    """A loss, a gradient or a parameter is no longer finite."""


class Due(NamedTuple):
    """What was started at a step because it is due there; None for what is not."""

    called: float  # when, by `time.perf_counter`
    window: Window | None = None
    evaluation: Evaluation | None = None
    probe: Probe | None = None
    geometry: Geometry | None = None  # beside a probe
    predicted: programs.Predicted | None = None  # likewise
    matrices: Params | None = None  # likewise, if they are kept


class Dispatch(NamedTuple):
    """What was started at a step and is not yet written down."""

    step: int
    updates: int
    due: Due
    times: dict[str, float] | None  # the `time/` scalars of the step, where what is due was waited for already
    records: Records
    record_at: list[int]  # steps, one for each used slot
    called: float  # when the updates were started
    asked: Array | None  # see `Agreement.ask`


def run_values(config: Config, stream: Stream) -> dict[str, Any]:
    """What config.json holds: the resolved config, its version, and what it does not say of the text."""
    return to_dict(config) | {"version": VERSION} | stream.content


def evaluation_scalars(e: Evaluation, stream: Stream) -> dict[str, float]:
    """Held-out loss and excess in nats a token, the loss by band of the target, and for text what it amounts to."""
    nll = np.asarray(e.nll, np.float64).sum(axis=0)
    tokens = np.asarray(e.tokens, np.int64).sum(axis=0)
    scalars = {METRIC: float(nll.sum() / tokens.sum())}
    if e.excess is not None:
        scalars["loss/excess"] = float(np.asarray(e.excess, np.float64).sum() / tokens.sum())
        scalars["loss/law"] = float(np.asarray(e.law, np.float64).sum() / tokens.sum())
    if stream.perplexity:
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(scalars[METRIC]))
        if math.isfinite(perplexity):  # of a loss above some 709 nats there is none that a float holds
            scalars["loss/perplexity"] = perplexity
    if e.bytes is not None:
        scalars["loss/bits_per_byte"] = float(nll.sum() / math.log(2) / np.asarray(e.bytes, np.int64).sum())
    return scalars | {f"band/{bands.NAMES[b]}/loss": float(nll[b] / tokens[b]) for b in np.flatnonzero(tokens)}


def train_run(
    trainer: Trainer,
    config: Config,
    stream: Stream,
    place: Path,
    stop: threading.Event,
    progress: Callable[[int], None],
    schedule: Schedule | None = None,
) -> None:
    """Train in a folder to the last step, from where the folder stands. Where several processes train, each has to be
    asked to, and the first alone writes.

    Args:
        trainer: the programs of the arm; its config differs from `config` in the seed alone.
        stop: once set, in any process, the run saves its state and raises `Interrupted`. So does an interrupt (Ctrl-C,
            the stop button of a notebook), unless it is handled already; a second one ends the run at once.
        progress: called with the number of updates done since the last call, those of earlier processes included.
        schedule: when to evaluate, record and save; by default as the config says.

    Raises:
        Diverged: a loss, a gradient or a parameter is not finite.
        Damaged: the newest checkpoint cannot be used.
        ConfigError: the folder belongs to another config.
        OSError: the disk does not take what is written; what was saved before stays good.
    """
    values = run_values(config, stream)
    if not from_first(lambda: _open(place, values, config.train.steps)):
        progress(config.train.steps)
        return
    checkpoints = Checkpoints(place / "checkpoints", config.checkpoint.keep)
    try:
        with stopped_by_interrupt(stop):
            _Loop(trainer, config, stream, place, checkpoints, progress, schedule or Schedule.of(config)).run(stop)
    except Diverged as error:
        raise Diverged(f"{error} in {place}; a lower optimizer.learning_rate or model.init_std may help") from None
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error
    finally:
        # All processes have to close it, and by an error that is not that of all one leaves alone.
        if not several() or isinstance(sys.exception(), Interrupted | Diverged | None):
            checkpoints.close()


def _open(place: Path, values: dict[str, Any], steps: int) -> bool:
    """Make a run's folder, or open it; whether there is something left to do."""
    folder.check(place, values)
    if is_finished(place, steps):
        return False
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / folder.CONFIG, values)
    return True


def _is_finite(tree: PyTree) -> bool:
    return all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(tree))


@jax.jit
def _is_finite_there(tree: PyTree) -> Bool[Array, ""]:
    """The same of what is spread over devices, and stays there."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


class _Loop:
    """The state of one run while it trains."""

    def __init__(
        self,
        trainer: Trainer,
        config: Config,
        stream: Stream,
        place: Path,
        checkpoints: Checkpoints,
        progress: Callable[[int], None],
        schedule: Schedule,
    ):
        self.trainer, self.config, self.stream = trainer, config, stream
        self.checkpoints, self.progress, self.schedule = checkpoints, progress, schedule
        self.layout = trainer.model.layout
        self.heldout = stream.heldout_ahead(max(config.data.eval_tokens, config.log.probe_tokens), self.layout)
        self.values = run_values(config, stream)
        fresh = trainer.init(np.uint32(config.seed))
        starts = {name: fresh.params[name] for name in trainer.model.vocabulary}  # they depend on the seed alone
        self.measure = Measure(starts, stream.frequencies, np.asarray(trainer.bands), self.layout)
        step, kept = from_first(lambda: checkpoints.latest()), trainer.kept(fresh)
        saved = None if step is None else checkpoints.restore(fresh, step=step, config=self.values, kept=kept)
        self.state = fresh if saved is None else saved
        self.step = int(self.state.step)
        self.saved_step = self.step  # step 0 needs no saving: it depends on the seed alone
        self.recorder = self._open_recorder(place) if is_first() else None
        self.background = Background(WAITING_RECORDS)
        self.dispatch_updates = 1  # adapted to the time they take
        self.agreement = Agreement()
        self.clock = Clock()
        self.measured = self.flushed = self.clock.started
        progress(self.step)

    def _open_recorder(self, place: Path) -> RunRecorder:
        trainer, stream, schedule = self.trainer, self.stream, self.schedule
        rows = Rows(stream.token_strings, stream.frequencies, np.asarray(trainer.bands), self.config.log.tokens)
        recorder = RunRecorder(
            place,
            self.step,
            self.values,
            trainer.model,
            rows,
            untied_from=trainer.model.untied_from,
            clusters=stream.heldout_clusters(self._held(self.config.data.eval_tokens)).ids,
            evaluated=stream.evaluated,
        )
        recorder.check_whole(
            self.step,
            rows=schedule.every_row,
            probes=schedule.probes,
            evaluations=schedule.evaluations,
            scalars=schedule.scalars,
        )
        return recorder

    def run(self, stop: threading.Event) -> None:
        try:
            last = self._run(stop)
            # A run is complete once its metrics hold the last step, so all else is on the disk before that.
            self.checkpoints.wait()
            self._write(last)
        finally:
            try:
                self.background.close()
            finally:
                if self.recorder is not None:
                    self.recorder.close()

    def _run(self, stop: threading.Event) -> Dispatch:
        running: Dispatch | None = None
        while True:
            due, times = self._start_due(), None
            interrupted = self.agreement.is_to_stop(stop) and self.step < self.schedule.steps
            if self.step != self.saved_step and (interrupted or self.step in self.schedule.checkpoints):
                # First everything before this step is written, so that a resume from here lacks nothing.
                self._write(running)
                running, times = None, self._wait(due)
                self._checkpoint(due)
            if interrupted:
                self._write(running)
                raise Interrupted(f"stopped after {self.step} updates, all of them saved")
            # The next dispatch is on its way before the results of the last one are waited for.
            new = self._start_dispatch(due, times, stop)
            self._write(running)
            running = new
            if running.step == self.schedule.steps:
                return running

    def _held(self, tokens: int) -> int:
        """So many held-out tokens, or those that there are."""
        return int(min(tokens, self.stream.heldout_tokens))

    def _start_due(self) -> Due:
        step, schedule, params, heldout = self.step, self.schedule, self.state.params, self.heldout
        evaluation = probe = geometry = predicted = matrices = None
        called = time.perf_counter()
        if step in schedule.evaluations:
            evaluation = programs.evaluate(self.trainer, params, heldout, self._held(self.config.data.eval_tokens))
        if step in schedule.probes:
            tokens = self._held(self.config.log.probe_tokens)
            probe, scored = programs.probe(self.trainer, params, heldout, tokens)
            predicted = programs.predict(self.trainer, scored)
            geometry = self.measure.look(params)
            if self.config.log.matrices:
                matrices = whole(self.layout, {name: params[name] for name in self.trainer.model.vocabulary})
        # Copied, since the dispatch that follows is given the state's own arrays to overwrite.
        window = jax.tree.map(jnp.copy, self.state.window) if step in schedule.scalars else None
        return Due(called, window, evaluation, probe, geometry, predicted, matrices)

    def _wait(self, due: Due) -> dict[str, float]:
        """Wait for what is due at a step, of which all updates before it are written; its `time/` scalars.

        Milliseconds of an update are the mean of those since the last record, without what else was done.
        """
        times: dict[str, float] = {}
        probe = None if due.probe is None else (due.probe, due.geometry, due.predicted)
        for part, results in (("evaluation", due.evaluation), ("probe", probe)):
            if results is not None:
                seconds = self.clock.wait(part, due.called, results)
                times |= {} if seconds is None else {f"time/ms_of_{part}": 1e3 * seconds}
        if due.window is not None:
            times["time/seconds"] = time.perf_counter() - self.clock.started
            mean = self.clock.per_update()
            times |= {} if mean is None else {"time/ms_per_update": 1e3 * mean}
        return times

    def _checkpoint(self, due: Due) -> None:
        loss = None if due.evaluation is None else evaluation_scalars(due.evaluation, self.stream)[METRIC]
        is_sound = _is_finite(self.state) if self.layout.mesh is None else bool(_is_finite_there(self.state))
        if not (is_sound and _is_finite(loss)):
            raise Diverged(f"the training state is no longer finite at step {self.step}")
        if self.recorder is not None:
            self.background.submit(self.recorder.flush)
            self.background.wait()
        self.checkpoints.save(self.state, self.values, loss, self.trainer.kept(self.state))
        self.saved_step = self.step

    def _start_dispatch(self, due: Due, times: dict[str, float] | None, stop: threading.Event) -> Dispatch:
        """Start the next updates: to the next step at which the host has to look, or fewer."""
        step, schedule, slots = self.step, self.schedule, self.trainer.slots
        last = step == schedule.steps
        # At the end the record is that of the batch that would come next; the state it leads to is dropped.
        most = int(min(self.agreement.length(self.dispatch_updates), self.stream.most_updates))
        end = step + 1 if last else min(step + most, schedule.next_boundary(step))
        record_at = schedule.rows[bisect.bisect_left(schedule.rows, step) : bisect.bisect_left(schedule.rows, end)]
        if len(record_at) > slots:
            end, record_at = record_at[slots], record_at[:slots]
        padded = np.array(record_at + [-1] * (slots - len(record_at)), np.int32)
        new_window = step == 0 or due.window is not None
        state = jax.tree.map(jnp.copy, self.state) if last else self.state
        ahead = self.stream.ahead(step, end - step, self.layout)
        called = time.perf_counter()
        state, records = self.trainer.advance(state, ahead, np.int32(end - step), padded, new_window)
        if not last:
            self.state, self.step = state, end
        asked = self.agreement.ask(stop, self.dispatch_updates)
        return Dispatch(step, 0 if last else end - step, due, times, records, record_at, called, asked)

    def _write(self, dispatch: Dispatch | None) -> None:
        """Wait for a dispatch and what was due at its first step, and write it all down."""
        if dispatch is None:
            return
        times = self._wait(dispatch.due) if dispatch.times is None else dispatch.times
        seconds = self.clock.wait("updates", dispatch.called, dispatch.records)
        self.clock.count(dispatch.updates, seconds)
        due, records, decision = jax.device_get((dispatch.due, dispatch.records, dispatch.asked))
        self.agreement.hear(decision)
        d = dispatch._replace(due=due, records=records)
        scalars = self._scalars(d) | times
        for step in sorted({d.step, *d.record_at}):
            at_start = step == d.step
            step_scalars = dict(scalars) if at_start else {}
            record = None
            if step in d.record_at:
                record = d.records.read(d.record_at.index(step), self.trainer.model)
                if self.trainer.has_sum_rule:
                    gradient_V = record.stats.total if self.trainer.model.tied_at(step) else record.stats.scoring
                    step_scalars["split/residual"] = float(record.residual) if gradient_V.any() else math.nan
            due = d.due if at_start else Due(d.due.called)
            if not _is_finite((record, due.probe, due.geometry, due.predicted)):
                raise Diverged(f"the gradients or updates are no longer finite at step {step}")
            if record is not None and step == self.schedule.steps:
                # The run makes no update there: a size would be one that was never applied.
                record = record._replace(updates=jax.tree.map(lambda v: np.full_like(v, np.nan), record.updates))
            self.background.submit(self._record, step, step_scalars, record, due)
        if d.updates:
            self.progress(d.updates)
        if self.recorder is not None and time.perf_counter() - self.flushed > FLUSH_SECONDS and d.updates:
            self.background.submit(self.recorder.flush)
            self.flushed = time.perf_counter()

    def _record(self, step: int, scalars: dict[str, float], record: Record | None, due: Due) -> None:
        """Write down what there is of a step, in the background, where the host's part of the geometry is done too."""
        if self.recorder is None:
            return
        measured = {} if due.geometry is None else self.measure.scalars(due.geometry)
        measured |= {} if due.predicted is None else self.measure.predictions(due.predicted)
        self.recorder.write(
            step,
            scalars,
            record,
            due.probe,
            due.evaluation,
            measured,
            None if due.geometry is None else due.geometry.drift,
            step in self.schedule.every_row,
            due.matrices,
        )

    def _scalars(self, d: Dispatch) -> dict[str, float]:
        """Scalars of a dispatch's first step, on the host; and the length of later dispatches, from its time."""
        now = time.perf_counter()
        seconds, self.measured = now - self.measured, now
        scalars: dict[str, float] = {}
        if d.due.window is not None and d.due.window.updates:
            scalars["loss/train"] = float(d.due.window.loss / d.due.window.updates)
            scalars["optimizer/clipped"] = float(d.due.window.clipped / d.due.window.updates)
        if d.due.evaluation is not None:
            scalars |= evaluation_scalars(d.due.evaluation, self.stream)
        if d.due.probe is not None:
            scalars["probe/tokens"] = float(d.due.probe.tokens)
        bad = [tag for tag, value in scalars.items() if not math.isfinite(value)]
        if bad:
            raise Diverged(f"{bad[0]} is no longer finite at step {d.step}")
        if d.updates:
            wanted = int(DISPATCH_SECONDS * d.updates / seconds)
            # One slow dispatch, which waited for a checkpoint perhaps, should not make the next ones tiny.
            self.dispatch_updates = min(max(wanted, self.dispatch_updates // 2, 1), 4 * self.dispatch_updates)
        return scalars
