"""The console command `tied-lm`, which is `python -m tied_lm.cli` as well: one of the scripts, by its name."""

import argparse
import importlib
import sys
import threading
from typing import NoReturn

from tied_lm.cli.command import Parser, run

COMMANDS = {
    "compare": "train arms with several seeds, and print the verdict",
    "train": "train one model, once",
    "sweep": "compare arms at every point of a grid of config fields",
    "study": "put published claims about tying to the test",
    "evaluate": "evaluate a run from one of its checkpoints, and sample from it",
    "geometry": "measure how the matrices of a run, or of a file, lie in space",
    "runs": "what is in a folder, and how it stands",
    "show": "the verdict of a folder again, or how far it is",
    "report": "write the page of a folder anew, without training",
    "benchmark": "measure speed and memory",
    "instrument": "train somebody else's model in somebody else's loop, recorded",
}


def _dispatch(arguments: list[str], stop: threading.Event) -> None:
    parser = Parser(
        prog="tied-lm",
        description="\n".join(f"{name:<12}{words}" for name, words in COMMANDS.items()),
        epilog="tied-lm COMMAND --help says what it takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of these")
    name = parser.parse_args(arguments[:1]).command
    sys.argv = [f"tied-lm {name}", *arguments[1:]]  # as which it speaks of itself, and is kept as provenance
    importlib.import_module(f"tied_lm.cli.{name}").main(arguments[1:], stop)


def main() -> NoReturn:
    run(_dispatch)


if __name__ == "__main__":
    main()
