"""The pages in a browser: what fits, what can be searched, sorted and brushed, and what they ask of other places."""

import itertools
import re

import numpy as np
import pytest

from tests.browser import started
from tests.study.test_sweepresults import point_of, results_from
from tied_lm.rows import PARTS
from tied_lm.study.palette import COLORS, arm_styles
from tied_lm.study.report import write_report
from tied_lm.study.rowspage import ROWS_PAGE, write_rows_page
from tied_lm.study.subject import ArmRuns, Probed, Subject
from tied_lm.study.sweepreport import write_sweep_page

pytestmark = pytest.mark.slow

READY = "Number(document.body.dataset.ready)"
COLUMN = "[...document.querySelectorAll('#table tbody tr')].map(line => line.cells[{}].textContent)"
PLACE = (
    "(() => { const b = document.querySelector('#charts canvas').getBoundingClientRect();"
    "return [b.left, b.top, b.width, b.height]; })()"
)
COUNT = "Number(document.getElementById('count').textContent.split(' ')[0].replaceAll(',', ''))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(comparison):
    write_report(comparison)
    return comparison


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The page of two arms with 50,000 rows, made up."""
    count, rng = 50_000, np.random.default_rng(0)
    frequency = 1 / np.arange(1, count + 1) ** 1.1
    styles, arms = arm_styles(["tied", "untied"]), {}
    for name, untied_from in {"tied": None, "untied": 0}.items():
        last = {part: rng.lognormal(-6, 1, count) * frequency**0.3 for part in PARTS}
        strings = [f"w{k}" for k in range(count)]
        probed = Probed(np.array([0]), {}, {}, last | {"cosine": rng.uniform(-1, 1, count)}, frequency, strings, [])
        arms[name] = ArmRuns(name, styles[name], [], untied_from)
        vars(arms[name])["probed"] = [probed]
    place = tmp_path_factory.mktemp("many")
    write_rows_page(Subject(place, {}, arms, list(arms), [], None))
    return place


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["report.html", ROWS_PAGE])
def test_a_page_fits_its_window_in_either_scheme(pages, browser, name, width, dark):
    tab = browser.open((pages / name).as_uri(), width, dark=dark)
    if name == ROWS_PAGE:
        tab.wait(READY)
        assert tab.evaluate("document.querySelector('#charts canvas').getBoundingClientRect().right") <= width
    assert tab.overflow() == 0
    assert tab.requests == [(pages / name).as_uri()]
    assert tab.complaints == []
    red, green, blue = map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])
    assert (red + green + blue < 200) == dark
    arm = tab.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--arm0')")
    assert arm == COLORS["arm0"][dark]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_a_sweep_fits_its_window(tmp_path, browser, width):
    grid = {"optimizer.learning_rate": [0.01, 0.1], "data.reversibility": [0.0, 1.0]}
    points = [
        point_of(i, dict(zip(grid, values, strict=True)), {"tied": [4.1, 4.2], "untied": [4.0, 4.1]})
        for i, values in enumerate(itertools.product(*grid.values()))
    ]
    write_sweep_page(tmp_path, results_from(points, ("tied", "untied"), 2, grid))
    tab = browser.open((tmp_path / "sweep.html").as_uri(), width)
    assert tab.overflow() == 0
    assert len(tab.requests) == 1
    assert tab.complaints == []
    cut = "[...document.querySelectorAll('th, td')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
    assert tab.evaluate(cut) == 0
    # The whole table is seen at 1280, and the difference, which stands second, on a phone.
    column = "document.querySelector('thead th:nth-child({})').getBoundingClientRect().right"
    assert tab.evaluate(column.format("2" if width < 500 else "9")) <= width


def test_the_pictures_and_the_verdict_need_no_script(pages, browser):
    assert "<script" not in (pages / "report.html").read_text(encoding="utf-8")
    tab = browser.open((pages / "report.html").as_uri(), scripts=False)
    assert "untied" in tab.evaluate("document.querySelector('.verdict').innerText")
    sizes = tab.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].map(one => one.getBoundingClientRect().height)"
    )
    assert len(sizes) > 20
    assert min(sizes) > 100
    fonts = tab.evaluate(
        "[...document.querySelectorAll('.panels text')].map(one => one.getBoundingClientRect().height)"
    )
    assert min(fonts) > 8
    tab = browser.open((pages / ROWS_PAGE).as_uri(), scripts=False)
    assert "need JavaScript" in tab.evaluate("document.querySelector('noscript').innerText")
    assert tab.evaluate("document.querySelectorAll('details table').length") == 5 + 4 + 4


def test_on_paper_nothing_is_cut(pages, browser):
    """At the width of A4 less its margins; the colours are the light ones whatever the screen's."""
    tab = browser.open((pages / "report.html").as_uri(), 700, media="print", dark=True)
    assert tab.overflow() == 0
    wide = "[...document.querySelectorAll('main *')].filter(one => one.getBoundingClientRect().right > 700).length"
    assert tab.evaluate(wide) == 0
    assert tab.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')") == COLORS["ink"][0]
    assert tab.call("Page.printToPDF")["data"]
    tab = browser.open((pages / ROWS_PAGE).as_uri(), 700, media="print")
    tab.wait(READY)
    assert tab.evaluate("getComputedStyle(document.getElementById('controls')).display") == "none"
    height = tab.evaluate("document.querySelector('#charts canvas').getBoundingClientRect().height")
    assert 300 < height < 700  # with the heading it has room on one page


def test_every_picture_has_words_of_its_own(pages, browser):
    tab = browser.open((pages / "report.html").as_uri())
    words = tab.evaluate("[...document.querySelectorAll('svg[role=img]')].map(one => one.getAttribute('aria-label'))")
    assert len(set(words)) == len(words)
    assert all(len(one) > 30 for one in words)


def test_rows_are_searched_sorted_and_brushed_together(pages, browser):
    tab = browser.open((pages / ROWS_PAGE).as_uri())
    tab.wait(READY)
    assert tab.evaluate(COUNT) == 20
    header = "[...document.querySelectorAll('#table th button')].find(one => one.textContent.startsWith('{}')).click()"
    tab.evaluate(header.format("lookup"))
    place = tab.evaluate(
        "[...document.querySelectorAll('#table th button')].findIndex(b => b.textContent.startsWith('l'))"
    )
    falling = [float(text) for text in tab.evaluate(COLUMN.format(place))]
    assert falling == sorted(falling, reverse=True)
    tab.evaluate(header.format("lookup"))
    assert tab.evaluate("document.querySelectorAll('[aria-sort=ascending]').length") == 1
    rising = [float(text) for text in tab.evaluate(COLUMN.format(place))]
    assert rising == falling[::-1]
    search = "const box = document.getElementById('find'); box.value = '{}'; box.dispatchEvent(new Event('input'))"
    tab.evaluate(f"(() => {{{search.format('17')}}})()")
    assert tab.evaluate(COLUMN.format(0)) == ["17"]
    tab.evaluate("document.getElementById('clear').click()")
    tab.wait(f"{COUNT} === 20")
    tab.wait(READY)
    left, top, width, height = tab.evaluate(PLACE)
    # Over the left half of the first chart, which is that of the share.
    tab.drag((left + 0.06 * width, top + 0.25 * height), (left + 0.24 * width, top + 0.8 * height))
    brushed = tab.wait(f"{COUNT} < 20 && {COUNT}")
    assert 0 < brushed < 20
    # The greatest rank that is left, of 20 on a logarithmic axis.
    assert max(int(text) for text in tab.evaluate(COLUMN.format(2))) < 20
    assert tab.complaints == []


def test_a_row_says_its_token_when_it_is_pointed_at(pages, browser):
    tab = browser.open((pages / ROWS_PAGE).as_uri())
    tab.wait(READY)
    # Where the canvas has the colour of the arm, there is a point of the chart of the share.
    x, y = tab.evaluate(
        "(() => { const canvas = document.querySelector('#charts canvas'), { width, height } = canvas;"
        "const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);"
        "const at = Array.from({ length: width * height }, (_, k) => k).filter((k) => data[4 * k + 3] > 150"
        " && data[4 * k] < 20 && data[4 * k + 2] > 150), middle = at[at.length >> 1];"
        "const box = canvas.getBoundingClientRect(), scale = width / box.width;"
        "return [box.left + (middle % width) / scale, box.top + Math.floor(middle / width) / scale]; })()"
    )
    tab.hover(x, y)
    told = tab.wait("(document.getElementById('vg-tooltip-element') || {}).innerText")
    assert all(name in told for name in ("token", "rank", "share", "cosine", "lookup"))


def test_another_arm_has_its_own_columns(pages, browser):
    tab = browser.open((pages / ROWS_PAGE).as_uri())
    tab.wait(READY)
    choose = "const one = document.getElementById('arm'); one.value = 'untied'; one.dispatchEvent(new Event('change'))"
    tab.evaluate(f"(() => {{{choose}}})()")
    names = tab.wait(
        "(() => { const all = [...document.querySelectorAll('#table th button')].map(one => one.textContent);"
        "return all.includes('share') ? null : all; })()"
    )
    assert names[-4:] == ["lookup", "scoring", "pull", "push"]
    assert tab.complaints == []


def test_fifty_thousand_rows_are_there_within_two_seconds(many, browser):
    tabs = [browser.open((many / ROWS_PAGE).as_uri()) for _ in range(3)]
    assert min(tab.wait(READY) for tab in tabs) < 2000
    tab = tabs[-1]
    search = "const box = document.getElementById('find'); box.value = 'W49'; box.dispatchEvent(new Event('input'))"
    begun = "performance.now()"
    taken = tab.evaluate(f"(() => {{ const begun = {begun}; {search}; return {begun} - begun; }})()")
    assert tab.evaluate(COUNT) == sum("w49" in f"w{k}" for k in range(50_000))
    assert taken < 500
    assert tab.overflow() == 0
    assert tab.complaints == []
