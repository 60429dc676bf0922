"""The results of a sweep as sentences, one table and one figure."""

import html
import math
import textwrap
from collections.abc import Callable
from pathlib import Path

from tied_lm.config.folder import CONFIG, SWEEP, read_config
from tied_lm.intervals import Difference, Estimate, with_interval
from tied_lm.study.board import board_line, deep_link
from tied_lm.study.ownbest import fewest_seeds
from tied_lm.study.page import html_table, labelled, paragraph, write_page
from tied_lm.study.picture import section
from tied_lm.study.report import write_report
from tied_lm.study.subject import Subject
from tied_lm.study.summary import REPORT, SUMMARY, Split, read_summary
from tied_lm.study.sweep import short_names, show
from tied_lm.study.sweepfigure import OWN, differences, splits, told_settings
from tied_lm.study.sweepresults import RESULTS, Combination, Results, read_results
from tied_lm.study.table import table
from tied_lm.study.verdict import looks

PAGE = "sweep.html"
CAVEAT = " !"
MOST_CAVEATS = 8  # that the terminal shows


def _mean(loss: Estimate | None) -> str:
    return "diverged" if loss is None else f"{loss.mean:.4f}"


def _outcome(difference: Difference | None, with_caveats: bool = False) -> str:
    said = (difference and difference.outcome) or "-"
    return said + CAVEAT if with_caveats else said


def table_rows(results: Results) -> list[list[str]]:
    """Each arm against the baseline at each point; for a grid of rates also with each arm at its own best.

    A star marks the rate that is best for the baseline, an exclamation mark arms about which there are caveats.
    """
    baseline, names = results.baseline, short_names(list(results.grid))
    others = [arm for arm in results.arms if arm != baseline]
    best = {combination.best_for_baseline for combination in results.combinations}
    head = ["arm", f"less {baseline}", "outcome", "held-out loss", f"that of {baseline}", "parameters"]
    rows = [[*names.values(), *head]]
    for point in results.points:
        star = " *" if point.index in best else ""
        cells = [show(value) + (star if f in results.rates else "") for f, value in point.settings.items()]
        for arm in others:
            difference, doubt = point.differences[arm], any(point.caveats.get(name) for name in (arm, baseline))
            losses = [_mean(point.eval_loss[name]) for name in (arm, baseline)]
            said = [with_interval(difference, "+"), _outcome(difference, doubt)]
            rows.append([*cells, arm, *said, *losses, f"{point.parameters[arm]:,}"])
    for combination in results.combinations:
        for arm in others:
            own, base = combination.own[arm], combination.own[baseline]
            edges = {field for found in (own, base) if found is not None for field in found.at_edge}
            cells = [
                show(combination.settings[field])
                if field in combination.settings
                else OWN + (" (edge)" if field in edges else "")
                for field in names
            ]
            difference = own.difference if own else None
            losses = [_mean(found.eval_loss if found else None) for found in (own, base)]
            said = [with_interval(difference, "+"), _outcome(difference)]
            rows.append([*cells, arm, *said, *losses, f"{combination.parameters[arm]:,}"])
    return rows


def _intervals(results: Results) -> str:
    """What the intervals of the points cover."""
    losses = "Held-out losses in nats a token at the last step; in brackets the 95% interval"
    if results.seeds == 1:
        return f"{losses} over the held-out text alone: it says nothing of other seeds."
    count = sum(found is not None for point in results.points for found in point.differences.values())
    together = f"; all {count} hold at once" if count > 1 else ""
    return f"{losses} over {results.seeds} seeds and held-out text, by both of which differences are paired{together}."


def _against_margin(results: Results) -> list[str]:
    """What the outcomes mean, and what would decide the open ones."""
    if results.seeds == 1:
        return []
    margin = f"{results.margin:g} nats (compare.margin)"
    said = [
        f"Outcome: better or worse by more than {margin}; equal, for practical purposes, within that; differs, perhaps "
        "by less than that; undecided, not told apart."
    ]
    found = [d for point in results.points for d in point.differences.values() if d and d.outcome == "undecided"]
    if found:
        seeds = [difference.seeds_to_decide for difference in found]
        enough = max((count for count in seeds if count is not None), default=0)
        which = "some of them" if None in seeds else "them"
        more = [f"about {enough:,} seeds (--config.compare.seeds={enough}) would decide {which}"] if enough else []
        if None in seeds:
            more.append(
                f"no number of seeds decides {'the others' if enough else 'them'}, since the held-out tokens vary too "
                "much: raise data.eval_tokens, or hold out more text"
            )
        said.append(f"{len(found)} undecided: {'; '.join(more)}.")
    return said


def _own_rates(results: Results) -> list[str]:
    """How arms are compared at their own best rates, and which these are."""
    if not results.rates:
        return []
    count = sum(bool(own and own.difference) for c in results.combinations for own in c.own.values())
    fewest = fewest_seeds(max(count, 1))
    test = "the interval is that of a permutation test, in which the arms are swapped within seeds and choose anew"
    if fewest is None or results.seeds < fewest:
        few = "for so many rows" if fewest is None else f"with fewer than {fewest} seeds"
        test = f"{few} they describe, and tell no arms apart"
    elif count > 1:
        test += f"; all {count} hold at once"
    how = (
        'In the rows "own best" each arm has its own rate: half of the seeds choose it and the others are measured '
        f"at it, in turns, so that no loss helped to choose its own rate; {test}."
        if results.seeds > 1
        else 'In the rows "own best" each arm has its own rate, chosen on the very seed that is compared, which '
        "flatters all arms: more seeds (--config.compare.seeds=5) choose fairly and give an interval."
    )
    rates = [_own_best(combination, results.rates) for combination in results.combinations]
    return [f"* is the rate that is best for {results.baseline}.", how, *rates]


def _own_best(combination: Combination, rates: list[str]) -> str:
    """Which rates are best for each arm of one combination, and whether the grid reaches beyond them."""
    names, ends = short_names(rates), []
    for arm, own in combination.own.items():
        if own is None:
            ends.append(f"{arm} diverged at every one")
            continue
        edges = [names[field] for field in own.at_edge]
        edge = f" (at the edge of the grid in {' and '.join(edges)}: a better one may lie beyond)" if edges else ""
        ends.append(f"{arm} at {told_settings(own.rates)}{edge}")
    where = f"With {told_settings(combination.settings)}: b" if combination.settings else "B"
    return f"{where}est rates: {'; '.join(ends)}."


def sentences(results: Results) -> list[str]:
    """What the table means, and what it leaves open; the caveats come after them."""
    said = [_intervals(results), *_against_margin(results), *looks(results.looks)]
    if results.matched:
        said.append(
            f"Arms were changed to come near the number of parameters of {results.baseline} (compare.match); each "
            "point's report.html says how, and how near."
        )
    said += _own_rates(results)
    diverged = [f"{arm} at {told_settings(point.settings)}" for point in results.points for arm in point.diverged]
    if diverged:
        counted = ", and count as an infinite loss when rates are chosen" if results.rates else ""
        said.append(f"Diverged in some seed{counted}: {'; '.join(diverged)}.")
    if caveats(results):
        said.append(f"{CAVEAT.strip()} marks arms of which there is more to know:")
    return said


def caveats(results: Results) -> list[str]:
    """What the curves of each point say against its losses, which an exclamation mark points to."""
    return [
        f"{told_settings(point.settings)}: {sentence}"
        for point in results.points
        for of_arm in point.caveats.values()
        for sentence in of_arm
    ]


def told_sweep(results: Results, width: int | None = None, bold: Callable[[str], str] = str) -> str:
    """Table, sentences and the first caveats, for the terminal; see `verdict`."""
    found = caveats(results)
    more = [f"... and {len(found) - MOST_CAVEATS:,} more, in {PAGE}"] if len(found) > MOST_CAVEATS else []
    said = [*sentences(results), *found[:MOST_CAVEATS], *more]
    said = said if width is None else [textwrap.fill(sentence, width) for sentence in said]
    return "\n".join([table(table_rows(results), width, len(results.grid) + 1, bold), "", *said])


def _page_table(results: Results) -> str:
    """The table with the difference second, share and cosine, and links to the points' own pages."""
    names = list(short_names(list(results.grid)).values())
    others = [arm for arm in results.arms if arm != results.baseline]
    points = [point for point in results.points for _ in others]
    (*_, arm, less, outcome, loss, base, parameters), *rows = table_rows(results)
    shown = [["point", less, arm, outcome, "lookup's share", "cosine", loss, base, parameters]]
    linked = []
    for k, row in enumerate(rows):
        settings, (arm, less, outcome, loss, base, parameters) = row[: len(names)], row[len(names) :]
        point = points[k] if k < len(points) else None
        split = (point and point.splits.get(arm)) or Split()
        found = ["-" if one is None else f"{one.mean:.3f}" for one in (split.share, split.cosine)]
        where = ", ".join(f"{name}={value}" for name, value in zip(names, settings, strict=True))
        shown.append([where, less, arm, outcome, *found, loss, base, parameters])
        linked.append(f"{point.folder}/{REPORT}" if point else "")
    return html_table(shown, linked=linked)


def _state(subject: Subject) -> str:
    """How far a point is."""
    done = sum(step == last for _, _, step, last, _ in subject.states)
    wanted = len(subject.names) * subject.values["compare"]["seeds"]
    return "finished" if subject.summary else f"{done} of {wanted} runs finished, {len(subject.states)} begun"


def rewrite_sweep(place: Path) -> None:
    """Write anew the pages of the points that have begun, and that of the sweep; nothing is trained.

    Raises:
        Damaged: what was written is not what is there.
    """
    points = [Subject.of(path.parent) for path in sorted(place.glob(f"*/{CONFIG}"))]
    for point in points:
        write_report(point.place)
    if (place / RESULTS).exists():
        write_sweep_page(place, read_results(place))
        return
    values = read_config(place, SWEEP)
    count = math.prod(map(len, values["grid"].values()))
    done = sum(point.summary is not None for point in points)
    rows = [["point", "state"], *([point.place.name, _state(point)] for point in points)]
    parts = [
        paragraph(f"Not finished: {done} of {count} points are, {len(points)} have begun.", "verdict"),
        html_table(rows, linked=[f"{point.place.name}/{REPORT}" for point in points]),
    ]
    write_page(place / PAGE, f"A sweep over {', '.join(values['grid'])}", parts)


def _board(place: Path, results: Results) -> str:
    """How to see the same in TensorBoard."""
    first = place / results.points[0].folder
    return board_line(deep_link(read_summary(first), of_sweep=True)) if (first / SUMMARY).exists() else ""


def write_sweep_page(place: Path, results: Results) -> None:
    """Write sweep.html into the folder of a finished sweep."""
    others = " and ".join(arm for arm in results.arms if arm != results.baseline)
    title = f"{others} against {results.baseline} over {', '.join(results.grid)}"
    more = "".join(f"<li>{html.escape(caveat)}</li>" for caveat in caveats(results))
    split = splits(results)
    parts = [
        section(differences(results)),
        _page_table(results),
        *(paragraph(sentence, "note") for sentence in sentences(results)),
        f"<ul class=note>{more}</ul>" if more else "",
        section(split) if split else "",
        _board(place, results),
        labelled("Versions", ", ".join(f"{name} {number}" for name, number in results.versions.items())),
    ]
    write_page(place / PAGE, title, parts)
