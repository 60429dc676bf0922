"""Where the numbers of a comparison come from: code, command, machine and time, in provenance.json.

It names no user, no host and no folder of the machine, so that it can be published with the results.
"""

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import tied_lm
from tied_lm.files import read_json, write_json

PROVENANCE = "provenance.json"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "tensorstore", "zarr", "xarray")
CODE = ("tied_lm", "configs", "experiments", "pyproject.toml", "constraints.txt")  # a change there makes a clone dirty
AGAIN = "remove that file; only where the numbers come from is lost"


def without_places(text: str) -> str:
    """A text whose paths are cut to their last part, but for those that begin in the current folder."""
    return re.sub(r"(?:~|\.\.|(?<![\w.])(?=/[^\s/]))[^\s,:=]*/([^\s,:=/]*)", r"…/\1", text)


def command(arguments: Sequence[str]) -> str:
    """A command line as it was typed, without places of the machine."""
    first, *others = arguments
    # As a module the script's own path stands first.
    name = Path(first).name
    script = (
        name if " " in first or not name.endswith(".py") else f"python -m {Path(first).parent.name}.{Path(first).stem}"
    )
    shown = map(without_places, others)
    return " ".join([script, *(shlex.quote(one) if " " in one else one for one in shown)])


def _git(*arguments: str) -> str | None:
    folder = Path(tied_lm.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> str | None:
    """The commit of the clone that the code is of, with a mark if its code was changed; None if it is of none."""
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", *CODE)
    return commit and commit + ("-dirty" if changed else "")


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _devices() -> dict[str, int]:
    kinds = [device.device_kind for device in jax.devices()]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


def _session() -> dict[str, Any]:
    """What is known at the start of a session."""
    return {
        "version": version("tied_lm"),
        "commit": _commit(),
        "command": command(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": None,  # until it ends
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "devices": _devices(),
        "python": platform.python_version(),
        "libraries": _versions(),
    }


def read_provenance(place: Path) -> list[dict[str, Any]]:
    """The sessions that worked on a comparison, in their order; none where it was made before they were kept.

    Raises:
        Damaged: the file is not what was written.
    """
    path = place / PROVENANCE
    return list(read_json(path, AGAIN, {"sessions": list})["sessions"]) if path.exists() else []


@contextlib.contextmanager
def recorded(place: Path) -> Iterator[None]:
    """Enter a session in provenance.json, and how long it took."""
    sessions, begun = [*read_provenance(place), _session()], time.monotonic()
    write_json(place / PROVENANCE, {"sessions": sessions})
    try:
        yield
    finally:
        sessions[-1]["seconds"] = round(time.monotonic() - begun, 3)
        write_json(place / PROVENANCE, {"sessions": sessions})


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def told(sessions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What a page says of them, as labels and texts; the newest session's, and how long all of them took."""
    if not sessions:
        return [("Provenance:", "not known: the folder was made before provenance.json was written.")]
    last, machine = sessions[-1], sessions[-1]["machine"]
    commit = last["commit"]
    clean = commit and commit.removesuffix("-dirty")
    code = f"commit {clean[:12]}" if clean else "installed, no commit known"
    code += ", with changes that are in no commit" if clean != commit else ""
    times = [one["seconds"] for one in sessions if one["seconds"] is not None]
    many = f" in {len(sessions)} sessions" if len(sessions) > 1 else ""
    took = f"{_duration(sum(times))}{many}" if times else "not ended yet, or cut off"
    devices = ", ".join(f"{count} x {kind}" for kind, count in last["devices"].items())
    libraries = ", ".join(f"{name} {number}" for name, number in last["libraries"].items())
    memory = f"{machine['memory_bytes'] / 2**30:.3g} GiB"
    where = f"{machine['processor']}, {machine['cores']} cores, {memory}, {machine['system']}"
    return [
        ("Made by", f"tied_lm {last['version']} ({code}): {last['command']}"),
        (
            "When and where",
            f"{sessions[0]['started'][:16].replace('T', ' ')} UTC, {took}; {where}; JAX devices: {devices}.",
        ),
        ("Versions", f"Python {last['python']}, {libraries}."),
    ]
