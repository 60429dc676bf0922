"""What TensorBoard shows of all points of a sweep together: one table, and the charts of the points side by side."""

from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Chart, Layout

from tied_lm.record.events import summary, write_events
from tied_lm.record.reader import open_run
from tied_lm.study.board import sessions_of
from tied_lm.study.hparams import write_sessions
from tied_lm.study.meanruns import CHARTS, MEAN, Charts, laid_out
from tied_lm.study.summary import read_summary
from tied_lm.study.sweep import Sweep


def _charts(place: Path) -> Iterator[tuple[str, Chart]]:
    """The charts of a point, each with its category, in the order in which they are shown."""
    for path in place.glob(f"{MEAN}/*/events.out.tfevents.*.{CHARTS}"):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                for category in Layout.FromString(value.tensor.string_val[0]).category:
                    yield from ((category.title, chart) for chart in reversed(category.chart))


def _write_charts(sweep: Sweep) -> None:
    """Write the charts of all points, by what they show. TensorBoard leaves out those that the points have again."""
    found: dict[str, dict[str, Charts]] = {}  # by category, what is shown, and title
    for point in sweep.points:
        for category, chart in _charts(point.place):
            shown = chart.title.replace(f", at {point.place.name}", "")
            (line,) = chart.margin.series
            of_all = found.setdefault(category, {}).setdefault(shown, {})
            of_all[chart.title] = ["Margin", [line.value, line.lower, line.upper]]
    layout = {
        category: {title: line for of_all in charts.values() for title, line in of_all.items()}
        for category, charts in found.items()
    }
    if layout:
        write_events(sweep.place, CHARTS, [(0, summary.custom_scalars(laid_out(layout)))])


def write_sweep_board(sweep: Sweep) -> None:
    """Write what TensorBoard needs for one table of all points of a finished sweep, a row for each arm at a point, and
    for their charts."""
    sessions = []
    for point in sweep.points:
        if any("tensorboard" not in arm.config.log.writers for arm in point.plan.arms.values()):
            return
        found = read_summary(point.place)
        runs = {arm: [open_run(point.place / arm / f"seed{seed}") for seed in found.seeds] for arm in found.arms}
        sessions += sessions_of(point.plan, runs, point.place.name)
    write_sessions([sweep.place, *(point.place for point in sweep.points)], sessions)
    _write_charts(sweep)
