"""What a terminal gets that a file does not: a first line that goes away again, its width, bold letters."""

import os
import shutil
import sys

CLEAR = "\r\x1b[K"
_waiting = False  # whether the line of `begin` stands there
_silent = False


def _is_plain() -> bool:
    """Whether no terminal that knows control codes reads what is written to standard output."""
    return not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"


def fall_silent() -> None:
    """From now on nothing is said but errors, since another process says all else."""
    global _silent
    end()
    _silent = True
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, until the process ends


def is_silent() -> bool:
    return _silent


def shows_progress() -> bool:
    """Whether a line on standard error can be written over: by a terminal, or by a notebook, which is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return not _silent and (sys.stderr.isatty() or hasattr(shell, "kernel"))


def begin(words: str) -> None:
    """The first sign of life, before the libraries are loaded; `end` takes it away, so that a mistake is one line."""
    global _waiting
    if sys.stderr.isatty() and not _waiting:
        _waiting = True
        print(words, end="", file=sys.stderr, flush=True)


def end() -> None:
    """Take away the line of `begin`."""
    global _waiting
    if _waiting:
        _waiting = False
        print(CLEAR, end="", file=sys.stderr, flush=True)


def width() -> int | None:
    """Columns of the terminal; None where there is none, so that lines may have any length."""
    return None if _is_plain() else shutil.get_terminal_size().columns


def bold(text: str) -> str:
    """Emphasised on a terminal, unless NO_COLOR is set (no-color.org)."""
    return text if _is_plain() or os.environ.get("NO_COLOR") else f"\x1b[1m{text}\x1b[0m"
