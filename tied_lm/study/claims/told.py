"""Studies in words: a line for the terminal, a page for each, and STUDIES.md for all."""

from collections.abc import Mapping, Sequence

from tied_lm.intervals import Ends, Estimate, with_interval
from tied_lm.study.claims.catalogue.impossible import NOT_DONE
from tied_lm.study.claims.running import Done
from tied_lm.study.claims.study import Outcome, Study, holm


def _value(mean: float | None, ends: Ends | None) -> str:
    return "-" if mean is None else with_interval(Estimate(mean, ends, ()), "+")


def _expected(outcome: Outcome) -> str:
    return f"{'above' if outcome.sign > 0 else 'below'} {outcome.margin:g}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    return "\n".join([_row(head), _row(["---"] * len(head)), *map(_row, rest)])


def line(study: Study, done: Done) -> str:
    """One line: each test with its value and its verdict by itself."""
    found = (f"{_value(o.mean, o.ci95)} {o.verdict()}" for o in done.outcomes)
    return f"{study.name} (claim {study.claims}): {'; '.join(found)}"


def section(study: Study, done: Done, adjusted: Sequence[float] | None = None, level: int = 1) -> str:
    """A study as Markdown.

    Args:
        adjusted: p of each test, adjusted for those of other studies.
        level: of its heading.
    """
    rows = [["what is measured", "claimed", "mean [95%]", "earlier trial", "p", "verdict"]]
    for number, outcome in enumerate(done.outcomes):
        p = outcome.p if adjusted is None else adjusted[number]
        mean = _value(outcome.mean, outcome.ci95)
        rows.append([outcome.words, _expected(outcome), mean, outcome.trial or "-", f"{p:.2g}", outcome.verdict(p)])
    parts = [
        f"{'#' * level} {study.name}: claim {study.claims}",
        f"{study.claim} ({study.source})",
        _table(rows),
    ]
    if study.note:
        parts.append(study.note)
    if done.beside:
        parts.append(
            "Beside it: " + "; ".join(f"{words} {_value(*value)}" for words, value in done.beside.items()) + "."
        )
    parts += [_setting(name, told) for name, told in done.settings.items()]
    parts.append(
        f"Seeds {done.seeds[0]} to {done.seeds[-1]}; measured on {done.date} in {done.seconds / 60:.1f} minutes, with "
        + ", ".join(f"{name} {version}" for name, version in done.versions.items())
        + "."
    )
    return "\n\n".join(parts)


def _setting(name: str, told: Mapping[str, object]) -> str:
    changed, arms, parameters = told["changed"], told["arms"], told["parameters"]
    assert isinstance(changed, list)
    assert isinstance(arms, Mapping)
    assert isinstance(parameters, Mapping)
    shown = ", ".join(f"{arm} (`{text}`; {parameters.get(arm, 'diverged')} parameters)" for arm, text in arms.items())
    matched = f" Matched by {told['match']}: {told['matched']}." if told["matched"] else ""
    return f"Setting *{name}*: {shown}.{matched} Off the default: {'; '.join(f'`{item}`' for item in changed)}."


def page(found: Mapping[str, tuple[Study, Done]], scale: str) -> str:
    """STUDIES.md: a table of all tests with verdicts adjusted for their number, then the studies."""
    tests = [(study, done, outcome) for study, done in found.values() for outcome in done.outcomes]
    adjusted = holm([outcome.p for _, _, outcome in tests])
    rows = [["claim", "study", "what is measured", "claimed", "mean [95%]", "verdict"]]
    for (study, _, outcome), p in zip(tests, adjusted, strict=True):
        mean = _value(outcome.mean, outcome.ci95)
        rows.append([study.claims, study.name, outcome.words, _expected(outcome), mean, outcome.verdict(p)])
    verdicts = [outcome.verdict(p) for (_, _, outcome), p in zip(tests, adjusted, strict=True)]
    counts = {word: sum(v.startswith(word) for v in verdicts) for word in ("holds", "does not", "cannot be told")}
    dates = sorted({done.date for _, done in found.values()})
    parts = [
        "# What is published about tying, put to the test",
        f"Made by `tied-lm study all --scale={scale}`, from the study.json of each study; measured from {dates[0]} to "
        f"{dates[-1]}. Verdicts are of these settings, which are small, and say nothing of larger models.",
        f"{len(found)} studies with {len(tests)} tests, over {len(next(iter(found.values()))[1].seeds)} seeds each: "
        f"{counts['holds']} hold here, {counts['does not']} do not, {counts['cannot be told']} cannot be told here. A "
        "test asks whether the mean lies beyond the margin on the side that is claimed; p is two-sided, of a t test "
        "over the seeds (for differences of losses over held-out tokens, too), and adjusted for the number of tests by "
        "Holm's method: a verdict is given where it is below .05. Intervals in brackets are 95% for one test alone. "
        "Settings, margins and seeds were fixed before the results, but for what a note says and a run of two of the "
        "seeds on bytes that took the time; an earlier trial with other seeds and "
        "settings stands beside, where there was one.",
        _table(rows),
        "## Not put to the test",
        "\n".join(f"- Claim {number}: {claim}: {reason}." for number, (claim, reason) in NOT_DONE.items()),
        "## The studies",
    ]
    start = 0
    for study, done in found.values():
        parts.append(section(study, done, adjusted[start : start + len(done.outcomes)], level=3))
        start += len(done.outcomes)
    return "\n\n".join(parts) + "\n"
