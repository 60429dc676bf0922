"""Train every arm with every seed, and print the verdict."""

import sys
import threading
from pathlib import Path

from experiments.command import cache_compiled_programs, parse, run, tensorboard_command


def main(arguments: list[str], stop: threading.Event) -> None:
    command = parse("Compare arms, by default a tied and an untied model, over several seeds.", arguments)

    from experiments.progress import Progress
    from tied_lm import comparison as c
    from tied_lm import folder
    from tied_lm.config import build_comparison, digest
    from tied_lm.report import REPORT, write_report
    from tied_lm.verdict import verdict

    cache_compiled_programs()
    comparison = build_comparison(command.values)
    arms = c.build_arms(comparison)
    values = c.resolved_values(command.values, comparison, arms)
    hashed = values | {"compare": {k: v for k, v in values["compare"].items() if k != "seeds"}}
    place = command.workdir or Path("runs") / f"{command.name}-{digest(hashed)}"
    c.check_folder(place, values)
    if c.is_complete(place, comparison) and (place / REPORT).exists():
        print(f"{place} is complete; nothing was changed.", file=sys.stderr)
        summary = c.read_summary(place)
    else:
        runs = comparison.runs()
        size = sum(arms[name].disk_bytes() for name, _ in runs)
        print(f"{len(runs)} runs in {place}, at most {size / 1e6:.0f} MB there", file=sys.stderr)
        with folder.locked(place):
            folder.write_json(place / folder.CONFIG, values)
            progress = Progress([(name, config.train.steps) for name, config in runs])
            try:
                c.train_all(comparison, arms, place, stop, progress.start_run)
            finally:
                progress.close()
            summary = c.summarize_comparison(comparison, arms, place)
            folder.write_json(place / c.SUMMARY, summary)
            write_report(place, summary)
    print(verdict(summary))
    print(f"\nPictures: {place / REPORT}\nTensorBoard: {tensorboard_command(place)}")


if __name__ == "__main__":
    run(main)
