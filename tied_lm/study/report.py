"""What is in a folder as pictures: one self-contained HTML file."""

from importlib.util import find_spec
from pathlib import Path

from tied_lm.record.reader import Shelf
from tied_lm.study.board import board_line, deep_link
from tied_lm.study.geometrytable import matrices
from tied_lm.study.lossfigure import losses
from tied_lm.study.movefigure import row_moves
from tied_lm.study.page import folded, html_table, labelled, link, paragraph, write_page
from tied_lm.study.picture import Section, section
from tied_lm.study.provenance import PROVENANCE, read_provenance, told, without_places
from tied_lm.study.rowfigure import rows_by_rank
from tied_lm.study.splitfigure import bands_at_end, bands_over_time, tokens_over_time
from tied_lm.study.subject import Subject
from tied_lm.study.summary import REPORT, Summary
from tied_lm.study.trained import config_table, trained
from tied_lm.study.verdict import accounts, conclusions, intervals

GET_ROWS = (
    "Every row, to search, sort and brush: install the extra (pip install 'tied_lm[page]', in a clone pip install -e "
    "'.[page]'), then tied-lm report DIR writes rows.html beside this page."
)


def _sections(subject: Subject) -> list[Section]:
    """All that can be drawn of what there is."""
    found = [losses(subject), rows_by_rank(subject)]
    if subject.split:
        if any(arm.untied_from is None for arm in subject.split):
            found.append(bands_at_end(subject))
        found.append(bands_over_time(subject))
    found += [tokens_over_time(subject), row_moves(subject)]
    return [one for one in found if one is not None]


def _title(subject: Subject) -> str:
    if "compare" not in subject.values:
        return f"A run of {subject.names[0]}"
    baseline = subject.values["compare"]["baseline"]
    return (
        " against ".join(subject.names)
        if len(subject.names) <= 3
        else f"{len(subject.names) - 1} arms against {baseline}"
    )


def _verdict(summary: Summary) -> list[str]:
    """The first sentences large, since they are what it is about, and what they mean below."""
    main = max(len(summary.differences), 1)
    said = [without_places(sentence) for sentence in conclusions(summary)]
    table = [[row[0], row[-1], *row[1:-1]] for row in summary.table()]
    return [
        *(paragraph(sentence, "verdict") for sentence in said[:main]),
        html_table(table),
        paragraph(f"Losses in nats a token, held out, at the last step. {intervals(summary)}", "note"),
        *(paragraph(sentence) for sentence in said[main:]),
        folded("Parameters and memory", "".join(paragraph(line) for line in accounts(summary))),
    ]


def _state(subject: Subject) -> list[str]:
    """How far each run is, where there is no verdict."""
    rows = subject.table()
    wanted = "compare" in subject.values
    missing = len(subject.names) * subject.values["compare"]["seeds"] - len(subject.states) if wanted else 0
    done = sum(step == last for _, _, step, last, _ in subject.states)
    more = f", and {missing} not begun" if missing else ""
    said = f"No verdict: {done} of {len(subject.states)} runs here are finished{more}."
    if not wanted:
        said = "One run: there is nothing to compare it with."
    mixed = len({step for _, _, step, _, _ in subject.states}) > 1
    words = "The runs stand at different steps: what is below is of the steps that each of them has so far."
    return [paragraph(said, "verdict"), html_table(rows), *([paragraph(words, "note")] if mixed else [])]


def write_report(place: Path, shelf: Shelf | None = None) -> None:
    """Write report.html into the folder of a comparison or a run, finished or not, and with the extra rows.html.

    Args:
        shelf: what is known of the runs already.

    Raises:
        ConfigError: it is no such folder.
        Damaged: what was written is not what is there.
    """
    subject = Subject.of(place, shelf)
    parts = _state(subject) if subject.summary is None else _verdict(subject.summary)
    if subject.arms:
        parts.append(labelled("Trained:", trained(subject)))
    if "compare" in subject.values or (place / PROVENANCE).exists():  # else it is known to the comparison it is of
        parts += [labelled(label, text) for label, text in told(read_provenance(place))]
    if subject.summary is not None:
        parts.append(board_line(deep_link(subject.summary)))
    parts += [config_table(subject.values), _rows(subject)]
    parts += [section(one) for one in _sections(subject)]
    parts.append(matrices(subject))
    write_page(place / REPORT, _title(subject), parts)


def _rows(subject: Subject) -> str:
    """Where every row is."""
    if not any(arm.probed for arm in subject.arms.values()):
        return ""
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        return paragraph(GET_ROWS, "note")
    from tied_lm.study.rowspage import ROWS_PAGE, write_rows_page

    write_rows_page(subject)
    return f"<p>{link(ROWS_PAGE, 'Every row')}: search, sort, and brush in share, cosine and norms together.</p>"
