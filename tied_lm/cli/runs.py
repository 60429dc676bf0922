"""What is in a folder of runs, finished or not."""

import textwrap
import threading
from pathlib import Path

from tied_lm.checks import ConfigError
from tied_lm.cli import terminal
from tied_lm.cli.command import Parser, check_path
from tied_lm.tokenstring import printable


def main(arguments: list[str], _: threading.Event) -> None:
    parser = Parser(description="Comparisons, sweeps and runs in a folder, and how they stand.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, nargs="?", default="runs", metavar="DIR", help="default: %(default)s")
    place = parser.parse_args(arguments).folder
    check_path("DIR", place)
    if not place.is_dir():
        raise ConfigError("DIR", str(place), "a folder that is there")
    terminal.begin(printable(f"{place}: loading the libraries ..."))

    from tied_lm.study.state import find, state_of

    found = list(find(place))
    terminal.end()
    if not found:
        print(printable(f"{place} holds no comparison, sweep or run"))
    width = terminal.width()
    for folder in found:
        name, line = printable(str(folder)), printable(str(state_of(folder)))
        folded = line if width is None else textwrap.fill(line, width, initial_indent="  ", subsequent_indent="  ")
        print(f"{name}  {line}" if width is None else f"{terminal.bold(name)}\n{folded}")
