"""The summary as pictures: one self-contained HTML file."""

import html
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tied_lm.bands import NAMES
from tied_lm.files import replace
from tied_lm.intervals import Estimate, Scale, summarize
from tied_lm.record.reader import Run, open_run
from tied_lm.rows import PARTS
from tied_lm.study.heldout import Heldout
from tied_lm.study.summary import SCALES, Summary
from tied_lm.study.verdict import accounts, arm_table, conclusions, intervals

REPORT = "report.html"
UNDEFINED = Estimate(math.nan, None, ())
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


def _curve(
    ax: Axes,
    x: Float[np.ndarray, "T"],
    values: Float[np.ndarray, "seeds T"],
    style: dict[str, Any],
    label: str,
    scale: Scale | None = None,
) -> None:
    """The mean over the seeds in which there is a value, and its 95% t interval, taken on a scale, as a band."""
    found = [summarize(column.tolist(), scale) if not np.isnan(column).all() else UNDEFINED for column in values.T]
    _shaded(ax, x, found, style, label)


def _shaded(
    ax: Axes, x: Float[np.ndarray, "T"], estimates: Iterable[Estimate], style: dict[str, Any], label: str
) -> None:
    """Means, and their 95% intervals as a band."""
    found = list(estimates)
    ax.plot(x, [one.mean for one in found], **style, label=label, lw=1.5)
    low, high = np.array([one.shown or (math.nan, math.nan) for one in found]).T
    ax.fill_between(x, low, high, color=style["color"], alpha=0.2, lw=0)


def _styles() -> Iterator[dict[str, Any]]:
    """Colours, then the same with other lines."""
    return ({"color": color, "ls": line} for line in itertools.cycle(("-", "--", ":", "-.")) for color in COLORS)


def _scalars(runs: list[Run], tag: str) -> tuple[Float[np.ndarray, "T"], Float[np.ndarray, "seeds T"]]:
    found = [run.scalars(tag) for run in runs]
    return np.array(list(found[0])), np.array([list(values.values()) for values in found])


def _legend(ax: Axes, entries: int) -> None:
    """Smaller where there is much to name."""
    ax.legend(frameon=False, fontsize="medium" if entries <= 4 else "x-small", ncols=1 if entries <= 4 else 2)


def _log_steps(ax: Axes) -> None:
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(left=0)
    ax.set_xlabel("updates")


def _losses(runs: Mapping[str, list[Run]], summary: Summary) -> Figure:
    law, clusters = summary.law_loss, summary.clusters
    assert clusters is not None  # some arm has a result
    figure, axes = new_figure(1 if law is None else 2)
    for style, (name, arm_runs) in zip(_styles(), runs.items(), strict=False):
        heldout = Heldout.of_runs(arm_runs, clusters.kind)
        measures = [one.measures(perplexity=False) for one in heldout.values()]
        for ax, key in zip(axes, ("eval_loss", "excess"), strict=False):
            _shaded(ax, np.array(list(heldout)), [getattr(one, key) for one in measures], style, name)
    axes[0].set(xlabel="updates", ylabel="held-out loss, nats a token")
    _legend(axes[0], len(runs))
    if law is not None:
        axes[0].axhline(law, color="#888", ls="--", lw=1)
        words = "the true law on the same tokens"
        axes[0].annotate(words, (0.02, law), xycoords=("axes fraction", "data"), va="top", color="#555")
        axes[1].set(xlabel="updates", ylabel="divergence from the true law, nats a token", yscale="log")
    return figure


def _norms_by_rank(runs: Mapping[str, list[Run]], summary: Summary) -> Figure:
    figure, axes = new_figure(len(runs), 4)
    for ax, (name, arm_runs) in zip(axes, runs.items(), strict=True):
        last = [run.probe.isel(step=-1) for run in arm_runs]
        frequency = last[0]["frequency"].values
        order = np.argsort(-frequency, kind="stable")
        rank = np.arange(1, order.size + 1)
        parts = PARTS if summary.arms[name].tied else PARTS[:-1]
        for color, part in zip(COLORS, parts, strict=False):
            mean_V = np.mean([data[part].values for data in last], axis=0)[order]
            present = mean_V > 0
            ax.plot(rank[present], mean_V[present], ".", ms=3, color=color, label=part, rasterized=order.size > 2000)
        ax.set(xscale="log", yscale="log", title=name, xlabel="rank by frequency", ylabel="row norm, nats / parameter")
    max(axes, key=lambda ax: len(ax.lines)).legend(frameon=False, markerscale=3, fontsize="small")
    low = min(ax.get_ylim()[0] for ax in axes)
    high = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(low, high)
    return figure


def _share_by_band(summary: Summary, tied: list[str]) -> Figure:
    figure, axes = new_figure(2)
    names = [name for name in NAMES if name in summary.arms[tied[0]].bands]
    for ax, key in zip(axes, ("share", "cosine"), strict=True):
        for i, (style, arm) in enumerate(zip(_styles(), tied, strict=False)):
            x = np.arange(len(names)) + min(0.12, 0.7 / len(tied)) * (i - (len(tied) - 1) / 2)
            values = [getattr(summary.arms[arm].bands[band], key) or UNDEFINED for band in names]
            mean = np.array([v.mean for v in values])
            low, high = np.array([v.shown or (math.nan, math.nan) for v in values]).T
            ax.errorbar(x, mean, [mean - low, high - mean], fmt="o", ms=4, color=style["color"], label=arm, capsize=2)
        ax.set_xticks(range(len(names)), names)
        ax.set(xlabel="band (0: most frequent rows)", ylabel=f"lookup's {key}" if key == "share" else key)
    axes[0].set_ylim(0, 1)
    axes[1].set_ylim(-1, 1)
    axes[1].axhline(0, color="#888", lw=1)
    _legend(axes[0], len(tied))
    return figure


def _share_over_time(runs: Mapping[str, list[Run]], tied: list[str]) -> Figure:
    figure, axes = new_figure(2)
    for ax, key in zip(axes, ("share", "cosine"), strict=True):
        for style, arm in zip(_styles(), tied, strict=False):
            _curve(ax, *_scalars(runs[arm], f"probe/split/{key}"), style, arm, SCALES[key])
        ax.set(ylabel=f"lookup's {key}, whole table" if key == "share" else "cosine, whole table")
        _log_steps(ax)
    axes[0].set_ylim(0, 1)
    axes[1].set_ylim(-1, 1)
    axes[1].axhline(0, color="#888", lw=1)
    _legend(axes[0], len(tied))
    return figure


def _median(updates_TxV: Float[np.ndarray, "T V"], weights_TxV: Float[np.ndarray, "T V"]) -> list[float]:
    """The median of the relative updates at each step, of the rows that moved and were not 0; NaN if there is none."""
    pairs = zip(updates_TxV, weights_TxV, strict=True)
    rows = [u[(u > 0) & (w > 0)] / w[(u > 0) & (w > 0)] for u, w in pairs]
    return [float(np.median(row)) if row.size else np.nan for row in rows]


def _relative_updates(runs: Mapping[str, list[Run]]) -> Figure:
    figure, (ax,) = new_figure(1)
    styles = _styles()
    for name, arm_runs in runs.items():
        data = [run.rows for run in arm_runs]
        for field in sorted(f for f in map(str, data[0]) if f.startswith("update")):
            weight = field.replace("update", "weight")
            ratio = [_median(d[field].values, d[weight].values) for d in data]
            label = f"{name}: {field.removeprefix('update_').replace('update', 'embedding')}"
            _curve(ax, data[0]["step"].values, np.array(ratio), next(styles), label)
    ax.set(yscale="log", ylabel="|update| / |row|, rows that moved")
    _log_steps(ax)
    _legend(ax, len(runs))
    return figure


def write_page(path: Path, title: str, parts: list[str]) -> None:
    """Replace a self-contained HTML file in one go."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    replace(path, "\n".join([head, f"<h1>{html.escape(title)}</h1>", *parts, "</html>\n"]).encode())


def html_table(rows: list[list[str]]) -> str:
    """A table whose first row is its head."""
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{''.join(lines)}</table>"


def _sections(runs: Mapping[str, list[Run]], summary: Summary) -> list[tuple[str, str, Figure]]:
    """Title, note and picture of each section."""
    tied = [name for name, arm in summary.arms.items() if arm.tied]
    probe = f"Over a probe of N = {summary.probe_tokens:,} held-out tokens"
    sections = [
        (
            "Held-out loss",
            f"Mean over {len(summary.seeds)} seeds. {intervals(summary)}"
            + ("" if summary.entropy is None else f" The entropy of the law is {summary.entropy:.4f} nats."),
            _losses(runs, summary),
        ),
        (
            "What each use asks of each row",
            f"{probe}, at the last step: L2 norm of each row's part of the gradient, mean over seeds. Rows whose part "
            "is zero are left out. In an untied model lookup and scoring belong to two matrices, so there is no total.",
            _norms_by_rank(runs, summary),
        ),
    ]
    if tied:
        sections += [
            (
                "The lookup against the scoring, by band",
                f"{probe}, at the last step. Share is |lookup|² / (|lookup|² + |scoring|²) over the rows of the band; "
                "with a negative cosine the two uses pull against each other. Bars: 95% t interval over seeds, at this "
                "probe.",
                _share_by_band(summary, tied),
            ),
            (
                "The lookup against the scoring, over training",
                f"{probe}. Shade: 95% t interval over seeds.",
                _share_over_time(runs, tied),
            ),
        ]
    sections.append(
        (
            "How far an update moves a row",
            "Size of the applied update relative to the row's own norm, median over the rows that moved: this alone "
            "can be compared between tied and untied models.",
            _relative_updates(runs),
        )
    )
    return sections


def write_report(place: Path, summary: Summary) -> None:
    """Write report.html into the folder of a finished comparison."""
    runs = {name: [open_run(place / name / f"seed{seed}") for seed in summary.seeds] for name in summary.arms}
    sections = _sections(runs, summary) if runs else []  # every arm may have diverged
    names = [*summary.arms, *summary.diverged]
    title = " against ".join(names) if len(names) <= 3 else f"{len(names) - 1} arms against {summary.baseline}"
    parts = [
        *(f"<p>{html.escape(sentence)}</p>" for sentence in conclusions(summary)),
        f"<div class=wide>{html_table(arm_table(summary))}</div>",
        f"<p class=note>Losses in nats a token, held out, at the last step. {html.escape(intervals(summary))}<br>",
        "<br>".join(html.escape(line) for line in accounts(summary)) + "</p>",
    ]
    parts += [f"<h2>{html.escape(h)}</h2>{svg(f)}<p class=note>{html.escape(note)}</p>" for h, note, f in sections]
    versions = ", ".join(f"{name} {number}" for name, number in summary.versions.items())
    parts.append(f"<p class=note>{html.escape(versions)}</p>")
    write_page(place / REPORT, title, parts)
