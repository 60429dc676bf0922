"""Train every arm with every seed, and print the verdict."""

import sys
import threading
from pathlib import Path

from experiments.command import cache_compiled_programs, parse, run, tensorboard_command


def main(arguments: list[str], stop: threading.Event) -> None:
    command = parse("Compare arms, by default a tied and an untied model, over several seeds.", arguments)

    from experiments.progress import Progress
    from tied_lm import comparison as c
    from tied_lm.report import REPORT
    from tied_lm.verdict import verdict

    cache_compiled_programs()
    plan = c.Plan.of(command.values)
    place = command.workdir or Path("runs") / f"{command.name}-{c.name_of(plan.values)}"
    c.check_folder(place, plan.values)
    if c.is_complete(place, plan):
        print(f"{place} is complete; nothing was changed.", file=sys.stderr)
    else:
        updates = plan.updates()
        print(f"{len(updates)} runs in {place}, at most {plan.disk_bytes() / 1e6:.0f} MB there", file=sys.stderr)
        progress = Progress(updates)
        try:
            c.complete(place, plan, stop, progress.start_run)
        finally:
            progress.close()
    print(verdict(c.read_summary(place)))
    print(f"\nPictures: {place / REPORT}\nTensorBoard: {tensorboard_command(place)}")


if __name__ == "__main__":
    run(main)
