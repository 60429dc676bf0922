"""Times of what a run does."""

import numpy as np
import pytest

from tests import tiny
from tied_lm import open_run
from tied_lm.train import clock
from tied_lm.train.clock import Clock


@pytest.fixture
def now(monkeypatch):
    """Seconds on the clock, in a list of one; waiting for a result of so many seconds sets it to these."""
    now = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock.jax, "block_until_ready", lambda end: now.__setitem__(0, max(now[0], end)))
    return now


def test_each_program_has_the_time_from_its_call_or_from_the_end_of_the_one_before(now):
    timer = Clock()
    assert timer.wait("evaluation", 100.0, 107.0) is None  # it was compiled
    assert timer.wait("updates", 101.0, 109.0) is None
    now[0] = 110.0  # the host did something else
    assert timer.wait("evaluation", 110.0, 112.5) == 2.5
    assert timer.wait("updates", 110.5, 115.0) == 2.5  # it waited for the evaluation on the device
    assert timer.wait("updates", 111.0, 116.0) == 1.0


def test_the_mean_is_over_the_updates_that_were_timed(now):
    timer = Clock()
    assert timer.per_update() is None
    timer.count(3, None)
    assert timer.per_update() is None
    timer.count(4, 2.0)
    timer.count(6, 1.0)
    timer.count(0, 50.0)  # a record at the last step, where no update is made
    assert timer.per_update() == pytest.approx(0.3)
    assert timer.per_update() is None


def test_updates_are_timed_without_evaluation_and_probe(tmp_path):
    # 2,000 batches in an evaluation and in a probe.
    tiny.train(tmp_path / "run", tiny.make_config("data.eval_tokens=20000", "log.probe_tokens=20000"))
    run = open_run(tmp_path / "run")
    per_update, evaluation, probe = (
        run.scalars(f"time/{name}") for name in ("ms_per_update", "ms_of_evaluation", "ms_of_probe")
    )
    assert list(per_update) == tiny.SCALAR_STEPS[1:]  # at the last step that of the updates before it
    assert list(evaluation) == tiny.EVALUATION_STEPS[1:]
    assert list(probe) == tiny.PROBE_STEPS[1:]
    # Most records of the updates have an evaluation or a probe since the one before. Medians, since machines pause.
    assert np.median(list(per_update.values())) < 0.25 * np.median(list(evaluation.values()))
    assert np.all(np.diff(list(run.scalars("time/seconds").values())) > 0)
