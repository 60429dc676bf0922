"""The lookup against the scoring: by band, over training, and for single tokens."""

import numpy as np
from matplotlib.axes import Axes

from tied_lm.intervals import Estimate, Scale
from tied_lm.rows import PARTS
from tied_lm.study.palette import COLORS, HYPOTHETICAL, part_style
from tied_lm.study.picture import (
    SMALL,
    Key,
    Picture,
    Section,
    by_band,
    curve,
    estimates,
    few_ticks,
    joined,
    log_steps,
    panel,
    plain_log,
)
from tied_lm.study.subject import ALL, ArmRuns, Subject
from tied_lm.study.summary import SCALES

WORDS = {"share": "lookup's share", "cosine": "cosine"}
MOST_ARMS, MOST_TOKENS = 4, 6  # whose histories are shown


def _bounded(ax: Axes, key: str) -> None:
    ax.set_ylim(*((-0.03, 1.03) if key == "share" else (-1.05, 1.05)))  # no point at an end is cut
    if key == "cosine":
        ax.axhline(0, color=COLORS["muted"][0], lw=1)
    few_ticks(ax.yaxis, 4)


def _of_band(arm: ArmRuns, key: str, band: str) -> tuple[np.ndarray, list[Estimate]]:
    """Its steps and the estimates over its runs."""
    scale: Scale = SCALES[key]
    x, values = joined([(one.steps.tolist(), one.split[key][band]) for one in arm.probed])
    return x, estimates(values, scale)


def _told(subject: Subject, key: str, band: str) -> str:
    """The last values, for an alternative text."""
    ends = {arm.name: _of_band(arm, key, band)[1][-1].mean for arm in subject.split}
    return "; ".join(f"{name} {value:.3f}" for name, value in ends.items())


def bands_at_end(subject: Subject) -> Section:
    """Share and cosine in each band at the last step, of the arms that are tied then."""
    arms = [arm for arm in subject.split if arm.untied_from is None]
    pictures = []
    for key, words in WORDS.items():
        figure, ax = panel(ylabel=words)
        by_band(
            ax,
            subject.bands,
            [(a.name, a.style, [_of_band(a, key, band)[1][-1] for band in subject.bands]) for a in arms],
        )
        _bounded(ax, key)
        told = "; ".join(f"{a.name}: {_numbers(a, key, subject.bands)}" for a in arms)
        pictures.append(Picture(figure, f"The {words} by band at the last step. {told}."))
    note = (
        "At the last probe. Share is |lookup|² / (|lookup|² + |scoring|²) over the rows of the band: at 1 their "
        "gradient comes from the lookup alone, at 0 from the scoring. With a negative cosine the two pull against each "
        "other. "
    )
    return Section("The lookup against the scoring, by band", note + _spread(subject), pictures, _keys(arms, False))


def _numbers(arm: ArmRuns, key: str, bands: list[str]) -> str:
    return ", ".join(f"band {band} {_of_band(arm, key, band)[1][-1].mean:.3f}" for band in bands)


def _spread(subject: Subject) -> str:
    """How the seeds are shown."""
    if subject.seeds < 2:
        return "One seed."
    return "Bars and shades: 95% t interval over seeds." if subject.seeds > 3 else "Small points: the seeds."


def _keys(arms: list[ArmRuns], lined: bool = True) -> list[Key]:
    return [Key(arm.name, arm.style, lined=lined) for arm in arms]


def bands_over_time(subject: Subject) -> Section:
    """Share and cosine of each band over training, a small panel for each."""
    arms = subject.split
    last = max(int(one.steps[-1]) for arm in arms for one in arm.probed)
    pictures = []
    for key, words in WORDS.items():
        for band in (ALL, *subject.bands):
            figure, ax = panel(SMALL, ylabel=words, title="all rows" if band == ALL else f"band {band}")
            for arm in arms:
                x, found = _of_band(arm, key, band)
                curve(ax, x, found, arm.style, arm.name, arm.split_until)
            _bounded(ax, key)
            log_steps(ax, last)
            where = "all rows" if band == ALL else f"the rows of band {band}"
            pictures.append(
                Picture(figure, f"The {words} in {where} against updates; at the end: {_told(subject, key, band)}.")
            )
    keys = _keys(arms)
    note = f"At each probe; band 0 holds the most frequent rows. {_spread(subject)}"
    late = [arm for arm in arms if arm.untied_from is not None]
    if late:
        keys.append(Key("after its untying, hypothetical", late[0].style._replace(line=HYPOTHETICAL), marked=False))
        parted = ", ".join(f"{arm.name} at step {arm.untied_from:,}" for arm in late)
        note += f" Untied late: {parted}; after that the scales of its two matrices are arbitrary."
    return Section("The lookup against the scoring, over training", note, pictures, keys, small=True)


def tokens_over_time(subject: Subject) -> Section | None:
    """What single tokens go through: the norms of the parts of their gradient."""
    arms = [arm for arm in subject.arms.values() if arm.probed][:MOST_ARMS]
    if not arms:
        return None
    first = arms[0].probed[0]
    rank = np.empty(first.frequency.size, int)
    rank[np.argsort(-first.frequency, kind="stable")] = np.arange(1, first.frequency.size + 1)
    last = max(int(one.steps[-1]) for arm in arms for one in arm.probed)
    drawn, pictures = [], []
    for arm in arms:
        for k, token in enumerate(first.followed[:MOST_TOKENS]):
            name = f"{first.strings[token]} (rank {rank[token]:,})"
            figure, ax = panel(SMALL, yscale="log", title=f"{arm.name}: {name}".replace("$", r"\$"))
            for part in ("lookup", "scoring", "pull", "push"):
                x, values = joined([(one.steps.tolist(), one.tokens[part][:, k]) for one in arm.probed])
                mean = np.array([one.mean for one in estimates(values)])
                style = part_style(part)
                ax.plot(x, np.where(mean > 0, mean, np.nan), color=style.light, marker=style.marker, ms=3, lw=1.2)
            ax.set_ylabel("row norm")
            log_steps(ax, last)
            drawn.append(ax)
            pictures.append(
                Picture(figure, f"Norms of the gradient's parts in the row of {name} over training, {arm.name}.")
            )
    low, high = (end(ax.get_ylim()[k] for ax in drawn) for k, end in enumerate((min, max)))
    for ax in drawn:
        ax.set_ylim(low, high)
        plain_log(ax.yaxis)
    note = (
        "Mean over seeds of the L2 norm of the row's part of the gradient at each probe, nats / parameter, for a "
        "frequent, a middle and a rare token, and for the first of log.tokens; what is 0 is left out. In an untied "
        "model the lookup's gradient belongs to another matrix than the scoring's."
    )
    keys = [Key(part, part_style(part)) for part in PARTS if part != "total"]
    return Section("What single tokens go through", note, pictures, keys, small=True)
