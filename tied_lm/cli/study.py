"""Put published claims to the test: one study by name, or all of them."""

import sys
import threading
from pathlib import Path

from tied_lm.checks import ConfigError
from tied_lm.cli.command import Parser, check_path, save_when_stopped, set_up_jax, tell
from tied_lm.tokenstring import printable

PAGES = {"small": "STUDIES.md", "base": "STUDIES-base.md"}


def main(arguments: list[str], stop: threading.Event) -> None:
    parser = Parser(
        description="Put published claims about tying to the test.",
        epilog="all does every study that is not done, and writes STUDIES.md in the current folder.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a study, or all")
    parser.add_argument("--list", action="store_true", help="tell names, claims and minutes, and what is not done")
    parser.add_argument("--scale", choices=PAGES, default="small", help="base is for an accelerator; default: small")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="default: runs/studies-<scale>")
    parser.add_argument("--text", nargs=2, metavar=("TRAIN", "HELDOUT"), help="files of words, as those of the PTB")
    flags = parser.parse_args(arguments)

    from tied_lm.files import replace
    from tied_lm.study.claims.catalogue.impossible import NOT_DONE
    from tied_lm.study.claims.names import studies
    from tied_lm.study.claims.running import Done, do_study
    from tied_lm.study.claims.study import Study
    from tied_lm.study.claims.told import line, page, section

    known = studies()
    if flags.list:
        print("\n".join(f"{s.name:<16}{s.claims:<14}{s.minutes:>3g} min  {s.claim}" for s in known.values()))
        print("\n".join(f"{'not done':<16}{n:<14}{'':<7}  {claim}: {why}" for n, (claim, why) in NOT_DONE.items()))
        return
    if flags.name != "all" and flags.name not in known:
        raise ConfigError("study", flags.name, " | ".join([*known, "all"]))
    workdir = flags.workdir or Path("runs") / f"studies-{flags.scale}"
    check_path("workdir", workdir)
    set_up_jax()
    wanted = known if flags.name == "all" else {flags.name: known[flags.name]}
    found: dict[str, tuple[Study, Done]] = {}
    save_when_stopped(stop)
    for number, (name, study) in enumerate(wanted.items(), 1):
        text = None if flags.text is None else (flags.text[0], flags.text[1])

        def started(what: str, name: str = name) -> None:
            if sys.stderr.isatty():
                print(f"\r{name}: {what}\x1b[K", end="\r", file=sys.stderr, flush=True)

        done = do_study(study, flags.scale, text, workdir, stop, started)
        found[name] = study, done
        replace(workdir / name / "study.md", (section(study, done) + "\n").encode())
        tell(f"{number} of {len(wanted)} {line(study, done)} [{done.seconds / 60:.1f} min]")
    if flags.name == "all":
        replace(Path(PAGES[flags.scale]), page(found, flags.scale).encode())
        print(f"{PAGES[flags.scale]}, and a page of each study in {printable(str(workdir))}/<name>/study.md")
    else:
        (one,) = found.values()
        print(section(*one))
