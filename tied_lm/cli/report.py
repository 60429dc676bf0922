"""Write the page of a folder anew, without training anything."""

import threading
from pathlib import Path

from tied_lm.cli.command import Parser, check_path
from tied_lm.tokenstring import printable


def main(arguments: list[str], stop: threading.Event) -> None:
    parser = Parser(
        description="Write the page of a comparison, a sweep or a run, finished or still running; nothing is trained.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a comparison, a sweep or a run")
    place = parser.parse_args(arguments).folder
    check_path("DIR", place)

    from tied_lm.config.folder import SWEEP
    from tied_lm.study.report import write_report
    from tied_lm.study.summary import REPORT
    from tied_lm.study.sweepreport import PAGE, rewrite_sweep

    is_sweep = (place / SWEEP).exists()
    if is_sweep:
        rewrite_sweep(place)
    else:
        write_report(place)
    print(f"Pictures: {printable(str(place / (PAGE if is_sweep else REPORT)))}")
