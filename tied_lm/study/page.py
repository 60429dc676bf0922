"""A self-contained HTML page: its frame, its tables, what can be folded."""

import html
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from tied_lm.files import replace
from tied_lm.study.palette import css

# Nothing is asked of any other place, whatever stands on a page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def resource(name: str) -> str:
    """A file that lies beside this one."""
    return (files("tied_lm.study") / name).read_text(encoding="utf-8")


def write_page(path: Path, title: str, parts: Sequence[str], policy: str = POLICY) -> None:
    """Replace a self-contained HTML file in one go."""
    name = html.escape(title)
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{name}</title><style>{css()}{resource('page.css')}</style></head><body><main>"
    )
    text = "\n".join([head, f"<h1>{name}</h1>", *parts, "</main></body></html>\n"])
    # Where the locale is none of UTF-8, Python holds the bytes of a path as surrogates; on the page they are its text.
    replace(path, text.encode(errors="surrogateescape").decode(errors="backslashreplace").encode())


def paragraph(text: str, kind: str = "") -> str:
    """A text of one paragraph."""
    return f"<p{kind and f' class={kind}'}>{html.escape(text)}</p>"


def labelled(label: str, text: str) -> str:
    """A line with its name. Flags of a command are broken within only where they must be."""
    shown = re.sub(r"--\S+", lambda found: f"<span class=flag>{found[0]}</span>", html.escape(text))
    return f"<p class=line><b>{html.escape(label)}</b> {shown}</p>"


def folded(title: str, content: str) -> str:
    """What is shown when it is asked for; on paper it stays folded."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def link(address: str, text: str) -> str:
    """To a file beside the page."""
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a>'


def html_table(rows: Sequence[Sequence[str]], marked: Sequence[int] = (), linked: Sequence[str] = ()) -> str:
    """A table whose first row is its head.

    Args:
        marked: numbers of the rows, without the head, that are told apart.
        linked: for each row, without the head, the file that its first cell leads to, "" for none.
    """
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = []
    for k, (first, *others) in enumerate(body):
        name = f'<a href="{html.escape(linked[k])}">{first}</a>' if linked and linked[k] else first
        cells = f"<th scope=row>{name}</th>" + "".join(map(_cell, others))
        lines.append(f"<tr{' class=marked' if k in marked else ''}>{cells}</tr>")
    names = "".join(f"<th scope=col>{cell}</th>" for cell in head)
    return f"<div class=wide><table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _cell(text: str) -> str:
    """Where the page is narrow an interval goes under its mean, whole."""
    mean, bracket, interval = text.partition(" [")
    return f"<td class=mean>{mean} <span>[{interval}</span></td>" if bracket else f"<td>{text}</td>"
