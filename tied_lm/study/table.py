"""Tables for the terminal."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

Rows = Sequence[Sequence[str]]


def table(rows: Rows, width: int | None = None, keys: int = 1, head: Callable[[str], str] = str) -> str:
    """Columns of equal width, the first aligned left and the others right.

    Args:
        width: of the terminal. Where they would be wider, intervals go below their means, and if that is not enough
            columns go below the others.
        keys: how many columns say what a row is of, and so stand before all others.
        head: how the first row is shown.
    """
    if width is not None and _width(_widths(rows)) > width:
        rows = [[cell.replace(" [", "\n[") for cell in row] for row in rows]
    widths = _widths(rows)
    keys = min(keys, len(widths) - 1)
    blocks = [list(range(keys))]
    for column in range(keys, len(widths)):
        together = [*blocks[-1], column]
        if width is not None and len(blocks[-1]) > keys and _width([widths[k] for k in together]) > width:
            blocks.append([*range(keys), column])
        else:
            blocks[-1] = together
    return "\n\n".join(_block([[row[k] for k in columns] for row in rows], head) for columns in blocks)


def _widths(rows: Rows) -> list[int]:
    return [max(len(line) for row in rows for line in row[k].split("\n")) for k in range(len(rows[0]))]


def _width(widths: list[int]) -> int:
    return 2 * len(widths) + sum(widths)


def _block(rows: Rows, head: Callable[[str], str]) -> str:
    widths, lines = _widths(rows), []
    for number, row in enumerate(rows):
        for cells in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            aligned = [c.rjust(w) if k else c.ljust(w) for k, (c, w) in enumerate(zip(cells, widths, strict=True))]
            line = ("  " + "  ".join(aligned)).rstrip()
            lines.append(line if number else head(line))
    return "\n".join(lines)
