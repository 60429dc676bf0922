"""The summary as pictures: one self-contained HTML file."""

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tied_lm.bands import NAMES
from tied_lm.intervals import RATIO, SHARE, Estimate, Scale, summarize
from tied_lm.record.reader import Run, open_run
from tied_lm.rows import FIELDS, PARTS
from tied_lm.study.heldout import Heldout
from tied_lm.study.page import COLORS, html_table, new_figure, svg, write_page
from tied_lm.study.summary import REPORT, SCALES, Summary
from tied_lm.study.verdict import accounts, arm_table, conclusions, intervals

UNDEFINED = Estimate(math.nan, None, ())


def _curve(
    ax: Axes,
    x: Float[np.ndarray, "T"],
    values: Float[np.ndarray, "seeds T"],
    style: dict[str, Any],
    label: str,
    scale: Scale | None = None,
) -> None:
    """The mean over the seeds in which there is a value, and its 95% t interval, taken on a scale, as a band."""
    _shaded(ax, x, [_summarized(column, scale) for column in values.T], style, label)


def _shaded(
    ax: Axes, x: Float[np.ndarray, "T"], estimates: Iterable[Estimate], style: dict[str, Any], label: str
) -> None:
    """Means, and their 95% intervals as a band."""
    found = list(estimates)
    ax.plot(x, [one.mean for one in found], **style, label=label)
    low, high = np.array([one.shown or (math.nan, math.nan) for one in found]).T
    ax.fill_between(x, low, high, color=style["color"], alpha=0.2, lw=0)


def _styles() -> Iterator[dict[str, Any]]:
    """Colours, then the same with other lines."""
    return (
        {"color": color, "ls": line, "lw": 1.5} for line in itertools.cycle(("-", "--", ":", "-.")) for color in COLORS
    )


def _scalars(runs: list[Run], tag: str) -> tuple[Float[np.ndarray, "T"], Float[np.ndarray, "seeds T"]]:
    found = [run.scalars(tag) for run in runs]
    return np.array(list(found[0])), np.array([list(values.values()) for values in found])


def _legend(figure: Figure) -> None:
    """Below the panels, which name the same things."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)


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
    _legend(figure)
    if law is not None:
        axes[0].axhline(law, color="#888", ls="--", lw=1)
        words = "the true law on the same tokens"
        axes[0].annotate(words, (0.02, law), xycoords=("axes fraction", "data"), va="top", color="#555")
        axes[1].set(xlabel="updates", ylabel="excess, nats a token", yscale="log")
    return figure


def _norms_by_rank(runs: Mapping[str, list[Run]], summary: Summary) -> Figure:
    figure, axes = new_figure(len(runs), 4)
    for ax, (name, arm_runs) in zip(axes, runs.items(), strict=True):
        last = [run.probe.isel(step=-1) for run in arm_runs]
        frequency = last[0]["frequency"].values
        order = np.argsort(-frequency, kind="stable")
        rank = np.arange(1, order.size + 1)
        parts = [part for part in PARTS if summary.arms[name].tied or not FIELDS[part].hypothetical]
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


def _by_band(ax: Axes, bands: Sequence[str], values: Mapping[str, Sequence[Estimate]]) -> None:
    """Means in each band with their 95% intervals, side by side."""
    for i, (style, (label, found)) in enumerate(zip(_styles(), values.items(), strict=False)):
        x = np.arange(len(bands)) + min(0.12, 0.7 / len(values)) * (i - (len(values) - 1) / 2)
        mean = np.array([one.mean for one in found])
        low, high = np.array([one.shown or (math.nan, math.nan) for one in found]).T
        ax.errorbar(x, mean, [mean - low, high - mean], fmt="o", ms=4, color=style["color"], label=label, capsize=2)
    ax.set_xticks(range(len(bands)), bands)
    ax.set_xlabel("band (0: most frequent rows)")


def _share_by_band(summary: Summary, tied: list[str], bands: Sequence[str]) -> Figure:
    figure, axes = new_figure(2)
    for ax, key in zip(axes, ("share", "cosine"), strict=True):
        found = {arm: [getattr(summary.arms[arm].bands[band], key) or UNDEFINED for band in bands] for arm in tied}
        _by_band(ax, bands, found)
        ax.set_ylabel(f"lookup's {key}" if key == "share" else key)
    axes[0].set_ylim(0, 1)
    axes[1].set_ylim(-1, 1)
    axes[1].axhline(0, color="#888", lw=1)
    _legend(figure)
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
    _legend(figure)
    return figure


def moves(updates_V: Float[np.ndarray, "V"], weights_V: Float[np.ndarray, "V"]) -> tuple[float, float]:
    """How far an update moved rows, and how many: the median of |update| / |row| over those that moved and were not 0,
    and the share of the rows that moved. NaN without such rows, and where there was no update."""
    moved_V = updates_V > 0
    of = moved_V & (weights_V > 0)
    size = float(np.median(updates_V[of] / weights_V[of])) if of.any() else math.nan
    return size, math.nan if np.isnan(updates_V).all() else float(moved_V.mean())


class Moves(NamedTuple):
    """What `moves` says of a run, by parameter."""

    steps: Int[np.ndarray, "T"]
    whole: dict[str, Float[np.ndarray, "T 2"]]  # of all rows, at each recorded step
    by_band: dict[str, Float[np.ndarray, "G 2"]]  # at the last update that was recorded

    @classmethod
    def of(cls, run: Run, bands: Sequence[str]) -> "Moves":
        data, whole, by_band = run.rows, {}, {}
        rows = [data["band"].values == NAMES.index(band) for band in bands]
        for field in sorted(name for name in map(str, data) if name.startswith("update")):
            update, weight = data[field].values, data[field.replace("update", "weight")].values
            name = field.removeprefix("update_").replace("update", "embedding")
            whole[name] = np.array(list(map(moves, update, weight)))
            # The last step has no update.
            by_band[name] = np.array([moves(update[-2, of], weight[-2, of]) for of in rows])
        return cls(data["step"].values, whole, by_band)


def _label_moves(sizes: Axes, shares: Axes) -> None:
    sizes.set(yscale="log", ylabel="|update| / |row|, rows that moved")
    shares.set(ylim=(-0.03, 1.03), ylabel="share of rows that moved")


def _moves_over_time(found: Mapping[str, list[Moves]]) -> Figure:
    figure, axes = new_figure(2)
    lines = [(name, parameter) for name, of_arm in found.items() for parameter in of_arm[0].whole]
    for i, (style, (name, parameter)) in enumerate(zip(_styles(), lines, strict=False)):
        of_arm = found[name]
        for ax, k, scale in zip(axes, (0, 1), (RATIO, SHARE), strict=True):
            values = np.array([one.whole[parameter][:, k] for one in of_arm])
            # All rows of many arms move: a thinner line leaves those below it to be seen.
            width = {"lw": 1.5 + 3 * (1 - (i + 1) / len(lines)) if k else 1.5}
            _curve(ax, of_arm[0].steps, values, style | width, f"{name}: {parameter}", scale)
    _label_moves(*axes)
    for ax in axes:
        _log_steps(ax)
    _legend(figure)
    return figure


def _moves_by_band(found: Mapping[str, list[Moves]], bands: Sequence[str]) -> Figure:
    figure, axes = new_figure(2)
    for ax, k, scale in zip(axes, (0, 1), (RATIO, SHARE), strict=True):
        values = {
            f"{name}: {parameter}": [
                _summarized(values_S, scale)
                for values_S in np.array([one.by_band[parameter][:, k] for one in of_arm]).T
            ]
            for name, of_arm in found.items()
            for parameter in of_arm[0].by_band
        }
        _by_band(ax, bands, values)
    _label_moves(*axes)
    _legend(figure)
    return figure


def _summarized(values: Float[np.ndarray, "seeds"], scale: Scale | None) -> Estimate:
    return UNDEFINED if np.isnan(values).all() else summarize(values.tolist(), scale)


def _sections(runs: Mapping[str, list[Run]], summary: Summary) -> list[tuple[str, str, Figure]]:
    """Title, note and picture of each section."""
    tied = [name for name, arm in summary.arms.items() if arm.tied]
    bands = [band for band in NAMES if band in next(iter(summary.arms.values())).bands]
    moved = {name: [Moves.of(run, bands) for run in of_arm] for name, of_arm in runs.items()}
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
                _share_by_band(summary, tied, bands),
            ),
            (
                "The lookup against the scoring, over training",
                f"{probe}. Shade: 95% t interval over seeds.",
                _share_over_time(runs, tied),
            ),
        ]
    sections += [
        (
            "How far an update moves a row",
            "Left, the size of the applied update relative to the row's own norm, median over the rows that moved: "
            "this alone can be compared between tied and untied models. Right, the share of the rows that moved at "
            "all. Shade: 95% t interval over seeds, on a log and a logit scale.",
            _moves_over_time(moved),
        ),
        (
            "How far an update moves a row, by band",
            "The same of the last recorded update. Bars: 95% t interval over seeds.",
            _moves_by_band(moved, bands),
        ),
    ]
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
