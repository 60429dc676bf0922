"""The fields of a config in words: what each is, from the comments of the file that has it."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tied_lm.config import OWN_DEFAULTS, flatten

COLUMN, WIDTH = 34, 79


def comments_in(text: str) -> dict[str, tuple[str, str]]:
    """Value and comment of each field that a config sets in lines `c.group.field = value  # comment`.

    A comment in a line of its own goes on with the one before it, or, at the head of a group, belongs to the field
    below. Nothing is executed.
    """
    found: dict[str, tuple[str, str]] = {}
    before, last = "", ""
    for line in text.splitlines():
        alone = re.fullmatch(r"\s+# (.*)", line)
        field = re.fullmatch(r"\s+c\.([\w.]+) = (?!ConfigDict\(\))(.*?)(?:  # (.*))?", line)
        if alone and last:
            found[last] = (found[last][0], f"{found[last][1]} {alone[1]}".strip())
        elif alone:
            before = f"{before} {alone[1]}"
        elif field:
            last = field[1]
            found[last] = (field[2].strip("\"'"), "; ".join(filter(None, [field[3], before.strip()])))
            before = ""
        else:
            before = last = ""
    return found


def field_help(files: list[Path]) -> str:
    """All fields, with the values and comments of some files, of which the later ones come first; else the defaults."""
    known = {field: (plain(value), "") for field, value in flatten(OWN_DEFAULTS).items()}
    for file in files:
        if file.is_file():
            for field, (value, comment) in comments_in(file.read_text(encoding="utf-8", errors="replace")).items():
                known[field] = (value, comment or known.get(field, ("", ""))[1])
    return "fields of the config, with their values:\n" + "\n".join(_entries(known))


def _entries(known: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    indent = " " * COLUMN
    for field, (value, comment) in known.items():
        head = f"  --config.{field}={value}"
        lines = textwrap.wrap(comment, WIDTH - COLUMN) or [""]
        if len(head) + 2 > COLUMN:
            yield head
        else:
            yield (head.ljust(COLUMN) + lines.pop(0)).rstrip()
        yield from (indent + line for line in lines if line)


def plain(value: Any) -> str:
    """A value as it is written in a flag."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
