"""How the vocabulary matrices of each arm lie in space at the end, as a table."""

import math

from tied_lm.bands import NAMES
from tied_lm.intervals import COSINE, SHARE, Estimate, Scale, summarize, with_interval
from tied_lm.record.reader import Run
from tied_lm.study.page import html_table, paragraph
from tied_lm.study.subject import ArmRuns, Subject

FIGURES: dict[str, tuple[str, Scale | None]] = {  # title and scale of the interval by tag, of a matrix
    "effective_rank": ("effective rank", None),
    "mean_row": ("mean row / mean norm", SHARE),
    "mean_cosine": ("mean cosine of two rows", COSINE),
    "band/{rare}/mean_cosine": ("of band {rare}", COSINE),
    "norm_slope": ("norm by log frequency", None),
    "cosine_to_start": ("cosine to the start", COSINE),
}
PREDICTIONS = {  # what stands beside, in words
    "predictions/calibration_error": "the expected calibration error {}",
    "predictions/band/{rare}/log_ratio": "the mean log(p/f) of band {rare} {}",
    "predictions/column_space_share": "the share of p - y in the column space {}",
}
LIKENESS = {"spearman": COSINE, "cka": SHARE}
NOTE = (
    "At the last probe of each run; in brackets the 95% interval over the seeds. The effective rank is at most D. Rows "
    "whose mean cosine is far above 0 lie in a cone. The norm of a row is against the log of its frequency, a nat. The "
    "cosine to the start is that of a row with itself at step 0."
)


def matrices(subject: Subject) -> str:
    """A section of the page; empty where no run has recorded it."""
    arms = {arm: lines for arm, runs in subject.arms.items() if (lines := _last(runs))}
    if not arms:
        return ""
    rare = next((b for b in reversed(NAMES) if any(f"/band/{b}/mean_cosine" in tag for tag in _tags(arms))), "")
    rows = [["", *(title.format(rare=rare) for title, _ in FIGURES.values())]]
    likeness, predictions = [], []
    for arm, lines in arms.items():
        names = dict.fromkeys(tag.split("/")[1] for tag in lines[0] if tag.endswith("/mean_row"))
        for name in names:
            tags = {f"geometry/{name}/{tag.format(rare=rare)}": scale for tag, (_, scale) in FIGURES.items()}
            row = [with_interval(_estimate(lines, tag, scale), digits=3) for tag, scale in tags.items()]
            rows.append([arm if len(names) == 1 else f"{arm}, {name}", *row])
        if "geometry/likeness/cka" in lines[0]:
            spearman, cka = (_estimate(lines, f"geometry/likeness/{tag}", scale) for tag, scale in LIKENESS.items())
            likeness.append(
                f"Input and output of {arm}: rank correlation of the cosines of pairs of rows "
                f"{with_interval(spearman, digits=3)}, CKA {with_interval(cka, digits=3)}."
            )
        predicted = [
            words.format(with_interval(_estimate(lines, tag.format(rare=rare), None), digits=3), rare=rare)
            for tag, words in PREDICTIONS.items()
            if tag.format(rare=rare) in lines[0]
        ]
        predictions += [f"Of what {arm} predicts: {', '.join(predicted)}."] if predicted else []
    told = "".join(paragraph(sentence) for sentence in likeness + predictions)
    return f"<section><h2>How the matrices lie</h2>{html_table(rows)}{told}{paragraph(NOTE, 'note')}</section>"


def _tags(arms: dict[str, list[dict[str, float]]]) -> set[str]:
    return {tag for lines in arms.values() for line in lines for tag in line}


def _last(arm: ArmRuns) -> list[dict[str, float]]:
    """The newest geometry of each run that has one."""

    def of_run(run: Run) -> dict[str, float]:
        lines = [line for line in run.lines() if any(tag.startswith("geometry/") for tag in line)]
        return lines[-1] if lines else {}

    return [line for run in arm.runs if (line := of_run(run))]


def _estimate(lines: list[dict[str, float]], tag: str, scale: Scale | None) -> Estimate | None:
    values = [line[tag] for line in lines if tag in line and not math.isnan(line[tag])]
    return summarize(values, scale) if values else None
