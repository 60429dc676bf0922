"""Tables on terminals of any width."""

import re

import pytest

from tests.study.summaries import summary
from tied_lm.study.table import table
from tied_lm.study.verdict import verdict

ROWS = [
    ["point", "arm", "less untied", "held-out loss", "parameters"],
    ["0.1", "tied", "+0.1059 [+0.0935, +0.1182]", "4.4155 [4.3684, 4.4626]", "8,192"],
    ["0.25", "untied", "-", "4.3096 [4.2712, 4.3481]", "16,384"],
]


def test_a_table_is_as_it_is_where_there_is_room():
    lines = [
        "  point     arm                 less untied            held-out loss  parameters",
        "  0.1      tied  +0.1059 [+0.0935, +0.1182]  4.4155 [4.3684, 4.4626]       8,192",
        "  0.25   untied                           -  4.3096 [4.2712, 4.3481]      16,384",
    ]
    assert table(ROWS) == table(ROWS, 80) == "\n".join(lines)


@pytest.mark.parametrize("width", [79, 65, 45, 30, 1])
def test_a_narrow_table_holds_the_same_in_lines_that_fit(width):
    told = table(ROWS, width, keys=2)
    if width >= 38:
        assert max(map(len, told.splitlines())) <= width
    words = [word for row in ROWS for cell in row for word in cell.split()]
    assert set(told.split()) == set(words)
    for block in told.split("\n\n"):
        assert block.splitlines()[0].split()[:2] == ["point", "arm"]
    if width == 65:
        assert told.splitlines()[:3] == [
            "  point     arm         less untied     held-out loss  parameters",
            "  0.1      tied             +0.1059            4.4155       8,192",
            "                 [+0.0935, +0.1182]  [4.3684, 4.4626]",
        ]


def test_the_verdict_fits_a_terminal_and_says_the_same():
    found = summary((0.005, 0.015))
    narrow = verdict(found, 80, lambda text: f"<{text}>")
    assert max(map(len, narrow.splitlines())) <= 82  # with the marks
    plain, wide = (
        re.sub(r"(?<=[a-z]-)\n *(?=[a-z])", "", re.sub("[<>]", "", told)) for told in (narrow, verdict(found))
    )
    assert sorted(plain.split()) == sorted(wide.split())
    assert "\n\n<The loss of tied is above that of untied here" in narrow


def test_a_summary_in_a_notebook_is_its_table():
    shown = summary((0.005, 0.015))._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<td>tied</td><td>100</td>" in shown
    assert "<th>less untied</th>" in shown
