"""The verdict of a folder again, or how far it is."""

import threading
from pathlib import Path

from tied_lm.checks import ConfigError
from tied_lm.cli import terminal
from tied_lm.cli.command import Parser, check_path, tensorboard_command, ways_to_see
from tied_lm.tokenstring import printable


def main(arguments: list[str], _: threading.Event) -> None:
    parser = Parser(
        description="The verdict of a comparison, the table of a sweep, or how far a folder is. Nothing is written.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a comparison, a sweep or a run")
    place = parser.parse_args(arguments).folder
    check_path("DIR", place)
    if not any((place / name).is_file() for name in ("config.json", "sweep.json", "metrics.jsonl")):
        raise ConfigError("DIR", str(place), "the folder of a comparison, a sweep or a run")
    terminal.begin(printable(f"{place}: loading the libraries ..."))
    told, see = _told(place)
    terminal.end()
    print(f"{told}\n\n{see}")


def _told(place: Path) -> tuple[str, str]:
    """What there is to say of a folder, and how to see it in TensorBoard."""
    from tied_lm.config.folder import CONFIG, SWEEP, read_config
    from tied_lm.record.reader import open_run
    from tied_lm.study.board import deep_link
    from tied_lm.study.state import find, state_of
    from tied_lm.study.subject import Subject
    from tied_lm.study.summary import read_summary
    from tied_lm.study.sweepreport import told_sweep
    from tied_lm.study.sweepresults import RESULTS, read_results
    from tied_lm.study.table import table
    from tied_lm.study.verdict import verdict

    width, bold, see = terminal.width(), terminal.bold, f"TensorBoard: {tensorboard_command(place)}"
    if (place / SWEEP).exists():
        if (place / RESULTS).exists():
            results = read_results(place)
            link = deep_link(read_summary(place / results.points[0].folder), of_sweep=True)
            return told_sweep(results, width, bold), ways_to_see(place, link)
        points = [point for below in sorted(place.iterdir()) if below.is_dir() for point in find(below, 0)]
        return "\n".join([str(state_of(place)), *(printable(f"{p.name}  {state_of(p)}") for p in points)]), see
    if (place / CONFIG).exists() and "compare" in read_config(place):
        subject = Subject.of(place)
        if subject.summary is not None:
            return verdict(subject.summary, width, bold), ways_to_see(place, deep_link(subject.summary))
        return f"{state_of(place)}\n{table(subject.table(), width, head=bold)}", see
    return f"{state_of(place)}\n{table(open_run(place).table(), width, head=bold)}", see
