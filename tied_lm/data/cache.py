"""Folders in the user's cache: made once, whole or not at all, and trusted if no other user can write them."""

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tied_lm.checks import ConfigError
from tied_lm.config import folder
from tied_lm.files import write_json

META = "meta.json"
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def corpora() -> Path:
    """Where tokens are kept."""
    return folder.cache_folder() / "corpora"


def provide(place: Path, write: Callable[[Path], None]) -> None:
    """Make a folder if it is not there yet. It gets its name once all is in it.

    Args:
        write: puts the files into a new folder.

    Raises:
        ConfigError: the cache cannot be written, or others can.
    """
    if os.path.lexists(place):
        return
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("cache", str(place.parent), f"a folder that can be written ({error.strerror})") from None
    _check_owner(place.parent.resolve(), stat.S_IWOTH)
    with _locked(place.with_suffix(".lock")):  # another process that makes it is waited for
        if not os.path.lexists(place):
            _make(place, write)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock whose file is not left behind."""
    while True:
        try:
            # A link to somebody's file is not followed, and nothing is truncated.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("cache", str(path), f"a file that can be written ({error.strerror})") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held it before has removed it.
            if path.exists() and os.path.samestat(os.fstat(file), path.lstat()):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(file)


def _make(place: Path, write: Callable[[Path], None]) -> None:
    new = place.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    new.mkdir(mode=0o700)
    try:
        write(new)
        hashes = {path.name: hash_of(path) for path in sorted(new.iterdir())}
        write_json(new / META, {"files": hashes, "sha256": _hash_of(place.name, hashes)})
        for path in new.iterdir():
            path.chmod(0o600)
        new.rename(place)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def hash_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(name: str, hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([name, hashes], sort_keys=True).encode()).hexdigest()


def _check_owner(path: Path, others: int = OTHERS) -> None:
    """Refuse what another user owns or can write, who could have put other tokens there."""
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & others:
        raise ConfigError(
            "cache",
            str(path),
            "what this user owns and nobody else can write; see its owner and mode, or set XDG_CACHE_HOME",
        )


def check(place: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder, which is whole and has been made by this user.

    Raises:
        ConfigError: it is not.
    """
    try:
        _check_owner(place.parent.resolve(), stat.S_IWOTH)
        for path in (place, *sorted(place.iterdir())):
            _check_owner(path)
        meta = json.loads((place / META).read_text(encoding="utf-8"))
        hashes: dict[str, str] = meta["files"]
        sound = meta["sha256"] == _hash_of(place.name, hashes)
        if sound and all(hash_of(place / name) == hashes[name] for name in hashes):
            return hashes
    except (OSError, TypeError, KeyError, json.JSONDecodeError, UnicodeDecodeError):
        pass
    raise ConfigError("cache", str(place), "an undamaged folder; remove it, and it will be made again")
