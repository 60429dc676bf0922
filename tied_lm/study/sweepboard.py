"""The table of a sweep in TensorBoard."""

from tied_lm.record.reader import open_run
from tied_lm.study.board import sessions_of
from tied_lm.study.hparams import write_sessions
from tied_lm.study.summary import read_summary
from tied_lm.study.sweep import Sweep


def write_sweep_board(sweep: Sweep) -> None:
    """Write what TensorBoard needs for one table of all points of a finished sweep, a row for each arm at a point."""
    sessions = []
    for point in sweep.points:
        if any("tensorboard" not in arm.config.log.writers for arm in point.plan.arms.values()):
            return
        summary = read_summary(point.place)
        runs = {arm: [open_run(point.place / arm / f"seed{seed}") for seed in summary.seeds] for arm in summary.arms}
        sessions += sessions_of(point.plan, runs, point.place.name)
    write_sessions([sweep.place, *(point.place for point in sweep.points)], sessions)
