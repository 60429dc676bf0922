"""A process whose calls that change files are logged, with its folder as it was before many of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def trace(place: Path, code: str, every: int, root: str = "run") -> tuple[Path, Path, list[list[str]]]:
    """Run code in the repository, with the folder to write as its argument.

    Args:
        place: an empty folder for all that is needed.
        every: of the many calls in arrays and checkpoints every so-manieth is copied.
        root: the folder in which calls are seen; another one than `run` until the code sets `TRACE_ROOT`.

    Returns:
        The folder that was written, that of the copies by the number of the call, and the calls: operation and paths.
    """
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("a C compiler and Linux are needed to see the calls of C++ libraries")
    library = place / "trace.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, ROOT / "tests" / "trace.c", "-ldl"], check=True)
    copies, run, log = place / "copies", place / "run", place / "log"
    copies.mkdir()
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "TRACE_ROOT": str(place / root),
        "TRACE_COPIES": str(copies),
        "TRACE_LOG": str(log),
        "TRACE_EVERY": str(every),
    }
    subprocess.run([sys.executable, "-c", code, run], env=environment, cwd=ROOT, check=True, timeout=300)
    return run, copies, [line.split("\t") for line in log.read_text().splitlines()]
