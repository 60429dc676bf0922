"""How the held-out loss came about, and the difference that the verdict speaks of."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from tied_lm.intervals import Crossed, Estimate
from tied_lm.study.heldout import Heldout
from tied_lm.study.palette import COLORS
from tied_lm.study.picture import Key, Picture, Section, curve, few_ticks, panel, plain_log
from tied_lm.study.subject import ArmRuns, Subject

Evaluated = dict[str, dict[int, Heldout]]  # by arm and step


def evaluated(subject: Subject) -> Evaluated:
    """The held-out sums of each arm, at the steps at which all of its runs were evaluated so far."""
    found = {}
    for name, arm in subject.arms.items():
        counts = []
        for run in arm.runs:
            try:
                with run.heldout as opened:
                    counts.append(opened.sizes["step"])
            except FileNotFoundError:
                counts.append(0)
        runs = [run for run, count in zip(arm.runs, counts, strict=True) if count]
        if runs:
            kind = subject.summary.clusters.kind if subject.summary and subject.summary.clusters else "sequence"
            found[name] = Heldout.of_runs(runs, kind, slice(min(filter(None, counts))))
    return found


def _ends(subject: Subject, of: dict[str, Sequence[Estimate]]) -> str:
    """The last means, for an alternative text."""
    return "; ".join(f"{name} {found[-1].mean:.4g}" for name, found in of.items() if len(found))


def _draw(
    ax: Axes, subject: Subject, found: Evaluated, value: Callable[[Heldout], Estimate | None]
) -> dict[str, Sequence[Estimate]]:
    drawn: dict[str, Sequence[Estimate]] = {}
    for name, by_step in found.items():
        pairs = [(step, one) for step, held in by_step.items() if (one := value(held)) is not None]
        if pairs:
            drawn[name] = [one for _, one in pairs]
            arm: ArmRuns = subject.arms[name]
            curve(ax, np.array([step for step, _ in pairs], float), drawn[name], arm.style, name)
    return drawn


def _zoomed(ax: Axes, drawn: dict[str, Sequence[Estimate]], law: float | None) -> None:
    """Leave a start that is far off outside, and say where it is."""
    later = [one.mean for found in drawn.values() for one in found[1:]] + ([] if law is None else [law])
    first = max((found[0].mean for found in drawn.values()), default=np.nan)
    if len(later) < 3 or not first > max(later) + 1.5 * (max(later) - min(later)):
        return
    pad = 0.08 * (max(later) - min(later) or 0.01)
    ax.set_ylim(min(later) - pad, max(later) + 2 * pad)
    ax.set_title(f"at step 0: {first:.2f}", loc="left", color=COLORS["muted"][0], fontsize=9)


def losses(subject: Subject) -> Section | None:
    """Loss, excess, and the difference to the baseline over training."""
    found, summary = evaluated(subject), subject.summary
    if not found:
        return None
    law = next(iter(next(iter(found.values())).values())).law_loss()
    figure, ax = panel(xlabel="updates", ylabel="held-out loss, nats a token")
    drawn = _draw(ax, subject, found, lambda held: held.measures(perplexity=False).eval_loss)
    _zoomed(ax, drawn, law)
    words = ""
    if law is not None:
        ax.axhline(law, color=COLORS["muted"][0], ls="--", lw=1)
        words = f" The dashed line is the loss of the true law on the same tokens, {law:.4f} nats."
    few_ticks(ax.xaxis)
    pictures = [Picture(figure, f"Held-out loss against updates; at the end, nats a token: {_ends(subject, drawn)}.")]
    if law is not None:
        figure, ax = panel(xlabel="updates", ylabel="excess, nats a token", yscale="log")
        drawn = _draw(ax, subject, found, lambda held: held.measures(perplexity=False).excess)
        plain_log(ax.yaxis)
        few_ticks(ax.xaxis)
        pictures.append(
            Picture(figure, f"Excess over the true law, nats a token; at the end: {_ends(subject, drawn)}.")
        )
    difference = _differences(subject, found)
    pictures += [difference] if difference else []
    entropy = summary and summary.entropy
    many = f"Mean over {subject.seeds} seeds" if subject.seeds > 1 else "One seed"
    how = "; shade: 95% interval" if subject.seeds > 3 else "; points: the seeds" if subject.seeds > 1 else ""
    compared = (
        " Last, the difference to the baseline, paired by seed; within the grey band it does not matter "
        "(compare.margin)."
        if difference
        else ""
    )
    of_law = "" if entropy is None else f" Its entropy is {entropy:.4f}."
    keys = [Key(name, subject.arms[name].style) for name in found]
    return Section("Held-out loss", f"{many}{how}.{words}{of_law}{compared}", pictures, keys)


def _differences(subject: Subject, found: Evaluated) -> Picture | None:
    """The loss of each arm less that of the baseline, over training, at the steps and seeds that both have."""
    compare = subject.values.get("compare", {})
    baseline, margin = compare.get("baseline"), compare.get("margin", 0.01)
    if baseline not in found or len(found) < 2:
        return None
    figure, ax = panel(xlabel="updates", ylabel=f"loss less that of {baseline}")
    ax.axhspan(-margin, margin, color=COLORS["muted"][0], alpha=0.18, lw=0)
    ax.axhline(0, color=COLORS["muted"][0], lw=1)
    drawn = {}
    for name, by_step in found.items():
        steps = [step for step in by_step if step in found[baseline]] if name != baseline else []
        pairs = [(step, by_step[step], found[baseline][step]) for step in steps]
        pairs = [(s, a, b) for s, a, b in pairs if a.nll.shape == b.nll.shape]
        if pairs:
            drawn[name] = [_estimate(a.less(b)) for _, a, b in pairs]
            x: Float[np.ndarray, "T"] = np.array([step for step, _, _ in pairs], float)
            curve(ax, x, drawn[name], subject.arms[name].style, name)
    few_ticks(ax.xaxis)
    few_ticks(ax.yaxis)
    alt = f"Held-out loss less that of {baseline} against updates; at the end: {_ends(subject, dict(drawn))}."
    return Picture(figure, alt) if drawn else None


def _estimate(crossed: Crossed) -> Estimate:
    return crossed.estimate()
