"""Train every arm with every seed, and print the verdict."""

import threading
from pathlib import Path

from tied_lm.cli import terminal
from tied_lm.cli.command import check_same, parse, save_when_stopped, set_up_jax, tell, ways_to_see
from tied_lm.tokenstring import printable


def main(arguments: list[str], stop: threading.Event) -> None:
    command = parse("Compare arms, by default a tied and an untied model, over several seeds.", arguments)

    from tied_lm.cli.progress import Progress
    from tied_lm.config import digest
    from tied_lm.data.documents import told
    from tied_lm.study import comparison as c
    from tied_lm.study.board import deep_link
    from tied_lm.study.estimate import clock, needs
    from tied_lm.study.plan import Plan
    from tied_lm.study.summary import REPORT, read_summary
    from tied_lm.study.table import table
    from tied_lm.study.verdict import verdict
    from tied_lm.train.calendar import Schedule
    from tied_lm.train.processes import from_first, is_first
    from tied_lm.train.resources import check_disk, shown

    set_up_jax(command)
    plan = Plan.of(command.values)
    if about := plan.about:
        tell(told(about))
    place = command.workdir or Path("runs") / f"{command.name}-{digest(plan.values)}"
    check_same(plan.values)

    def check() -> bool:
        """Whether the folder, if it is this comparison's, is complete."""
        c.check_folder(place, plan.values)
        c.check_runs(place, plan)
        return c.is_complete(place, plan)

    is_complete = from_first(check)
    if command.flags.dry_run:
        rows, seconds = needs(plan.arms, plan.comparison.seeds)
        print(table(rows, terminal.width(), head=terminal.bold))
        count, disk, where = len(plan.updates()), shown(plan.disk_bytes()), printable(str(place))
        print(f"{count} runs in {where}, at most {disk} there, about {clock(seconds)}; nothing was written")
        return
    save_when_stopped(stop)
    if is_complete:
        tell(f"{place} is complete; nothing was changed.")
    else:
        updates, size = plan.updates(), plan.disk_bytes()
        if is_first():
            check_disk(place, size)
        thinning = Schedule.of(plan.comparison.base).thinning
        tell(f"{len(updates)} runs in {place}, at most {shown(size)} there{thinning}")
        progress = Progress(updates)
        try:
            c.complete(place, plan, stop, progress.start_run)
        finally:
            progress.close()
    if not is_first():
        return
    summary = read_summary(place)
    print(verdict(summary, terminal.width(), terminal.bold))
    print(f"\nPictures: {printable(str(place / REPORT))}\n{ways_to_see(place, deep_link(summary))}")
