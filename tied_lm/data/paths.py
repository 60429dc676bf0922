"""The files that paths name: a file, every file below a folder, or those that match a glob."""

import fnmatch
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tied_lm.checks import ConfigError

LeftOut = defaultdict[str, set[str]]

KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class Found(NamedTuple):
    """Files in order, each with whether a path names it by itself, and what was left out, by the reason."""

    files: dict[str, bool]
    left_out: LeftOut


def find(field: str, paths: tuple[str, ...]) -> Found:
    """The regular files that paths name; links are followed, and each file is taken once.

    Of folders and globs hidden files and folders, `__MACOSX`, links that lead nowhere and what is no file (a FIFO, a
    device) are left out. Nothing is opened.

    Args:
        field: of the config, which holds the paths.

    Raises:
        ConfigError: a path names nothing, or something that is no file.
    """
    files: dict[str, bool] = {}
    left_out: LeftOut = defaultdict(set)
    taken: set[str] = set()
    for path in paths:
        expanded = os.path.expanduser(path)
        by_itself = os.path.lexists(expanded)
        try:
            matches = [expanded] if by_itself else sorted(_matches("", Path(expanded).parts, left_out), key=Path)
            if not matches:
                raise ConfigError(field, path, "existing files or folders, or globs that match some")
            for match in matches:
                folder = os.path.isdir(match)
                for file in sorted(_files(match, left_out), key=Path) if folder else [match]:
                    reason = _reason(file)
                    if reason and by_itself and not folder:
                        raise ConfigError(field, file, f"files that can be read, and folders of them ({reason})")
                    if reason:
                        left_out["unreadable or no files"].add(file)
                    elif (real := os.path.realpath(file)) not in taken:
                        taken.add(real)
                        files[file] = by_itself and not folder
        except OSError as error:
            raise ConfigError(field, error.filename or path, f"files that can be read ({error.strerror})") from None
    return Found(files, left_out)


def _reason(file: str) -> str | None:
    """Why this is not to be opened."""
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        return error.strerror
    return None if stat.S_ISREG(mode) else f"it is {KINDS.get(stat.S_IFMT(mode), 'none')}"


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _entries(folder: str, left_out: LeftOut) -> Iterator[str]:
    """What is in a folder, without what is hidden."""
    for name in os.listdir(folder or "."):
        path = os.path.join(folder, name)
        if _hidden(name):
            left_out["hidden"].add(path)
        else:
            yield path


def _folders(folder: str, left_out: LeftOut, seen: set[str]) -> Iterator[str]:
    """A folder and those below it, each once, though links may lead in circles."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    yield folder
    for path in _entries(folder, left_out):
        if os.path.isdir(path):
            yield from _folders(path, left_out, seen)


def _files(folder: str, left_out: LeftOut) -> Iterator[str]:
    for below in _folders(folder, left_out, set()):
        yield from (path for path in _entries(below, left_out) if not os.path.isdir(path))


def _matches(base: str, parts: tuple[str, ...], left_out: LeftOut) -> Iterator[str]:
    """What matches a glob below a folder. `glob` itself would follow circles of links."""
    if not parts:
        yield base
        return
    first, *rest = parts
    if first == "**" and not rest:
        yield base or "."  # a folder stands for all below it
    elif first == "**":
        for folder in _folders(base, left_out, set()):
            yield from _matches(folder, tuple(rest), left_out)
    elif any(sign in first for sign in "*?["):
        for name in sorted(os.listdir(base or ".")) if os.path.isdir(base or ".") else ():
            if fnmatch.fnmatchcase(name, first) and (first.startswith(".") or not _hidden(name)):
                yield from _matches(os.path.join(base, name), tuple(rest), left_out)
    elif os.path.lexists(path := os.path.join(base, first)):
        yield from _matches(path, tuple(rest), left_out)
