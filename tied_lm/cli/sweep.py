"""Compare the arms at every point of a grid of config fields, and print one table."""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tied_lm.checks import ConfigError
from tied_lm.cli import terminal
from tied_lm.cli.command import parse, save_when_stopped, set_up_jax, tell, ways_to_see
from tied_lm.cli.scheduler import sbatch_script
from tied_lm.tokenstring import printable

if TYPE_CHECKING:
    from tied_lm.cli.progress import Progress
    from tied_lm.study.sweep import Point, Sweep


def _add_flags(parser: argparse.ArgumentParser) -> None:
    grid = "values of a field; may be given several times"
    parser.add_argument("--grid", action="append", default=[], metavar="FIELD=V1,V2,...", help=grid)
    parser.add_argument("--index", type=int, metavar="I", help="do one point only, counted from 0")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="points at a time; default: %(default)s")
    sbatch = "print a script that hands the points to SLURM, and write nothing"
    parser.add_argument("--sbatch", action="store_true", help=sbatch)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main(arguments: list[str], stop: threading.Event) -> None:
    command = parse("Compare arms at every point of a grid of config fields.", arguments, _add_flags)
    index, workers = command.flags.index, command.flags.workers
    if workers < 1:
        raise ConfigError("workers", workers, "at least 1")

    from tied_lm.config import digest, read_mesh
    from tied_lm.data.documents import told
    from tied_lm.study import sweep
    from tied_lm.study.comparison import check_runs
    from tied_lm.train.calendar import Schedule
    from tied_lm.train.resources import check_disk, shown

    if read_mesh(command.values).distributed:
        raise ConfigError("mesh.distributed", True, "False in a sweep; compare and train take several processes")
    set_up_jax()
    grid = sweep.read_grid(command.values, command.flags.grid)
    name = f"sweep-{command.name}-{digest(sweep.resolved_values(command.values, grid))}"
    the_sweep = sweep.Sweep.of(command.values, grid, command.workdir or Path("runs") / name)
    points, place = the_sweep.points, the_sweep.place
    if index is not None and not 0 <= index < len(points):
        raise ConfigError("index", index, f"0 to {len(points) - 1}, since the grid has {len(points)} points")
    if command.flags.worker:
        save_when_stopped(stop)
        _serve(points, stop)
        return
    chosen = points if index is None else [points[index]]
    for point in chosen:
        check_runs(point.place, point.plan)
    todo = sweep.by_programs([point for point in chosen if not point.is_complete()])
    size = sum(point.plan.disk_bytes() for point in todo)
    check_disk(place, size)
    if command.flags.dry_run:
        _tell_needs(todo, place, size)
        return
    if command.flags.sbatch:
        call = [sys.executable, "-m", "tied_lm.cli", "sweep", *(a for a in arguments if a != "--sbatch")]
        print(sbatch_script(call, sorted(point.index for point in todo)))
        return
    save_when_stopped(stop)
    the_sweep.open()
    for line in dict.fromkeys(told(point.plan.about) for point in points if point.plan.about):
        tell(line)
    thinning = "".join(dict.fromkeys(Schedule.of(point.plan.comparison.base).thinning for point in todo))
    tell(f"{len(todo)} of {len(points)} points to do in {place}, at most {shown(size)} there{thinning}")
    alone = workers == 1 or index is not None
    failed = _do(todo, stop) if alone else _share_out(todo, workers, arguments, stop)
    if failed:
        if index is not None:
            sys.exit(printable(f"error: {failed[points[index].place.name]}"))
        reasons = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        sys.exit(printable(f"error: {len(failed)} of {len(todo)} points failed: {reasons}"))
    if not the_sweep.is_complete():
        print(f"{sum(p.is_complete() for p in points)} of {len(points)} points are complete", file=sys.stderr)
        return
    _show(the_sweep, bool(todo))


def _show(the_sweep: "Sweep", is_new: bool) -> None:
    """The table and the page of a complete sweep, and what TensorBoard shows of it, where something of it is new."""
    from tied_lm.config import folder
    from tied_lm.study.board import deep_link
    from tied_lm.study.summary import read_summary
    from tied_lm.study.sweepboard import write_sweep_board
    from tied_lm.study.sweepreport import PAGE, told_sweep, write_sweep_page
    from tied_lm.study.sweepresults import RESULTS, Results, write_results

    place = the_sweep.place
    with folder.locked(place, wait=True):
        results = Results.of(the_sweep)
        if is_new or not (place / RESULTS).exists():
            write_sweep_board(the_sweep)
        write_results(place, results)
        write_sweep_page(place, results)
    print(told_sweep(results, terminal.width(), terminal.bold))
    link = deep_link(read_summary(place / results.points[0].folder), of_sweep=True)
    print(f"\nPicture: {printable(str(place / PAGE))}\n{ways_to_see(place, link)}\n(its tab HPARAMS has the table)")


def _tell_needs(todo: "list[Point]", place: Path, size: int) -> None:
    """Say what the points would take, as far as the first one tells."""
    from tied_lm.study.estimate import clock, needs
    from tied_lm.study.table import table
    from tied_lm.train.resources import shown

    updates, seconds = [n for point in todo for _, n in point.plan.updates()], 0.0
    if todo:
        plan = todo[0].plan
        rows, first = needs(plan.arms, plan.comparison.seeds)
        print(f"{printable(todo[0].place.name)}:\n{table(rows, terminal.width(), head=terminal.bold)}")
        seconds = first * sum(updates) / sum(n for _, n in plan.updates())
    print(
        f"{len(todo)} points, {len(updates)} runs in {printable(str(place))}, at most {shown(size)} there, about "
        f"{clock(seconds)} if an update takes as long in all of them; nothing was written"
    )


def _each(points: "Iterable[Point]") -> "Iterator[Point]":
    """The points one by one. The programs of those before are dropped where a point has other ones: those of some
    thousand points would use up the 65,530 mappings of memory that Linux allows a process."""
    import jax

    programs = None
    for point in points:
        if programs is not None and programs != point.programs:
            jax.clear_caches()
        programs = point.programs
        yield point


def _complete(point: "Point", stop: threading.Event, progress: "Progress") -> str | None:
    """Do a point; what is wrong, if anything is."""
    from tied_lm.files import Damaged
    from tied_lm.study.comparison import complete, read_diverged

    problem, name = None, point.place.name
    try:
        complete(point.place, point.plan, stop, lambda arm, seed: progress.start_run(f"{name} {arm}", seed))
    except (ConfigError, Damaged, OSError) as error:
        problem = str(error)
        tell(f"{name} failed: {problem}")
    for arm, reason in read_diverged(point.place).items():
        tell(f"{name}: {arm} diverged ({reason})")
    return problem


def _progress(points: "Sequence[Point]") -> "Progress":
    from tied_lm.cli.progress import Progress

    return Progress([(f"{p.place.name} {arm}", n) for p in points for arm, n in p.plan.updates()])


def _do(points: "Sequence[Point]", stop: threading.Event) -> dict[str, str]:
    """Do points one after the other; the names of those that failed, and why."""
    with contextlib.closing(_progress(points)) as progress:
        problems = {point.place.name: _complete(point, stop, progress) for point in _each(points)}
    return {name: problem for name, problem in problems.items() if problem is not None}


def _serve(points: "Sequence[Point]", stop: threading.Event) -> None:
    """As a worker, do the points that the parent gives."""
    from tied_lm.cli.workers import answer, parts_to_do

    for point in _each(points[index] for index in parts_to_do()):
        with contextlib.closing(_progress([point])) as progress:
            answer(_complete(point, stop, progress))


def _share_out(points: "Sequence[Point]", workers: int, arguments: list[str], stop: threading.Event) -> dict[str, str]:
    """Do points in several processes; the names of those that failed, and why."""
    from tied_lm.cli.progress import clock
    from tied_lm.cli.workers import run_workers
    from tied_lm.train.loop import Interrupted

    failed: dict[str, str] = {}
    names = {point.index: point.place.name for point in points}
    begun, ended = time.perf_counter(), 0

    def done(part: int, problem: str | None) -> None:
        nonlocal ended
        ended += 1
        name = names[part]
        if problem is not None:
            failed[name] = problem
        seconds = (time.perf_counter() - begun) / ended * (len(points) - ended)
        tell(
            f"{name} {'done' if problem is None else f'failed: {problem}'}; {ended} of {len(points)} points, "
            f"about {clock(seconds)} left"
        )

    command = [sys.executable, "-m", "tied_lm.cli", "sweep", *arguments, "--worker"]
    run_workers(command, list(names), min(workers, len(points)), stop, done)
    if stop.is_set() and ended < len(points):
        raise Interrupted(f"stopped after {ended} of {len(points)} points; what the others did is saved")
    return failed
