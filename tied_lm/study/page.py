"""Tables and figures on one self-contained HTML page."""

import html
import io
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tied_lm.files import replace

# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; } .note { color: #555; font-size: .9rem; }
"""


def svg(figure: Figure) -> str:
    """The figure as an element of a page."""
    buffer = io.StringIO()
    # A fixed salt, so that one summary always gives one file.
    with mpl.rc_context({"svg.hashsalt": "tied_lm"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def new_figure(panels: int, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """So many panels in the style of all figures, at most three in a row; `height` is that of a row."""
    columns = min(panels, 3)
    rows = -(-panels // columns)
    figure = Figure(figsize=(10, rows * height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for ax in axes[panels:]:
        ax.remove()
    axes = axes[:panels]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#eee")
        ax.set_axisbelow(True)
    return figure, axes


def write_page(path: Path, title: str, parts: list[str]) -> None:
    """Replace a self-contained HTML file in one go."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    replace(path, "\n".join([head, f"<h1>{html.escape(title)}</h1>", *parts, "</html>\n"]).encode())


def html_table(rows: list[list[str]]) -> str:
    """A table whose first row is its head."""
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{''.join(lines)}</table>"
