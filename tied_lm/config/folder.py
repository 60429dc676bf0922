"""Whose folder it is: its config and its lock."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tied_lm.checks import ConfigError
from tied_lm.config.identity import differing_fields
from tied_lm.files import Damaged, check_shape, read_json

CONFIG = "config.json"
SWEEP = "sweep.json"
LOCK = ".lock"
RESTORE = "restore it"
# Of what a config has to hold for a folder to be read at all.
OF_RUN = {"seed": int, "model": {"tying": str}}
OF_COMPARISON = OF_RUN | {"compare": {"arms": dict, "baseline": str, "seeds": int}}
OF_SWEEP = OF_COMPARISON | {"grid": dict}


def cache_folder() -> Path:
    """The user's cache folder: what is there can be made again.

    Raises:
        ConfigError: the user has none, and no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tied_lm"
    except RuntimeError:
        raise ConfigError("XDG_CACHE_HOME", None, "a folder, since no home is known") from None


def read_config(folder: Path, file: str = CONFIG) -> dict[str, Any]:
    """The config in the folder of a run or of a comparison, or that of a sweep.

    Args:
        file: CONFIG or SWEEP.

    Raises:
        Damaged: it is not what was written, or no config.
        FileNotFoundError: there is none.
    """
    path = folder / file
    values = read_json(path, RESTORE)
    check_shape(path, RESTORE, values, OF_SWEEP if file == SWEEP else OF_COMPARISON if "compare" in values else OF_RUN)
    for field, tried in values.get("grid", {}).items():
        check_shape(path, RESTORE, {field: tried}, {field: list})
    return values


def check(folder: Path, values: Mapping[str, Any], file: str = CONFIG) -> None:
    """Refuse a folder that is not free for this config.

    Args:
        file: where in the folder its config is.

    Raises:
        ConfigError: the folder is that of another config (the fields are named), or of something else.
    """
    path = folder / file
    if path.exists():
        try:
            old = read_json(path, RESTORE)
        except (OSError, Damaged) as error:
            raise ConfigError("workdir", str(folder), f"a folder whose {file} can be read ({error})") from None
        if differences := differing_fields(old, values):
            raise ConfigError("workdir", str(folder), f"a folder of the same config; here {'; '.join(differences)}")
    elif folder.exists() and (
        not folder.is_dir() or any(p.name not in (LOCK, f"{file}.new") for p in folder.iterdir())
    ):
        raise ConfigError("workdir", str(folder), "a new or empty folder, or one of an earlier run")


def is_locked(folder: Path) -> bool:
    """Whether a process is writing it."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keep two processes from writing one folder.

    Args:
        wait: wait until no other process is writing it.

    Raises:
        ConfigError: another process is writing it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Whatever else has that name is left as it is.
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError("workdir", str(folder), f"a folder that can be written ({error.strerror})") from None
    with os.fdopen(file, "r+b", buffering=0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            raise ConfigError("workdir", str(folder), "a folder that no other process is writing") from None
        yield
