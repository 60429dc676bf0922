"""What the page of every row holds."""

import base64
import json
import re
import shutil

import numpy as np
import pytest

from tests.study.test_report import page
from tied_lm import open_run
from tied_lm.study import report, rowspage
from tied_lm.study.subject import Subject

pytestmark = pytest.mark.slow  # pages are drawn


def held(place, name):
    text = (place / "rows.html").read_text(encoding="utf-8")
    return json.loads(re.search(f'<script type="application/json" id="{name}">(.*?)</script>', text, re.S)[1])


def decoded(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


@pytest.fixture
def own(comparison, tmp_path):
    """A copy, whose pages may change: tests run in any order."""
    return shutil.copytree(comparison, tmp_path / "run")


def test_it_holds_the_means_over_seeds_by_falling_frequency(comparison):
    data = held(comparison, "data")
    assert list(data["arms"]) == ["tied", "untied", "late"]
    assert [arm["tied"] for arm in data["arms"].values()] == [True, False, False]
    probes = [open_run(comparison / "tied" / f"seed{seed}").probe.isel(step=-1).load() for seed in (0, 1)]
    frequency = decoded(data["frequency"])
    assert (np.diff(frequency) <= 0).all()
    np.testing.assert_array_equal(data["tokens"], probes[0]["token_string"].values[data["ids"]])
    columns = data["arms"]["tied"]["columns"]
    for name in ("lookup", "scoring", "pull", "push", "total"):
        expected = np.mean([probe[name].values[data["ids"]] for probe in probes], axis=0)
        np.testing.assert_allclose(decoded(columns[name]), expected, rtol=1e-6)
    squares = [[probe[use].values[data["ids"]].astype(float) ** 2 for use in ("lookup", "scoring")] for probe in probes]
    with np.errstate(invalid="ignore"):
        share = np.nanmean([lookup / (lookup + scoring) for lookup, scoring in squares], axis=0)
    np.testing.assert_allclose(decoded(columns["share"]), share, rtol=1e-6)
    assert set(data["arms"]["untied"]["columns"]) == {"lookup", "scoring", "pull", "push"}
    assert not data["many"]


def test_the_charts_are_of_what_has_a_meaning(comparison):
    specs = held(comparison, "specs")
    assert specs["true"]["params"][0]["views"] == ["share", "cosine"]
    assert [len(specs[tied]["concat"]) for tied in ("true", "false")] == [3, 1]
    for chart in specs["true"]["concat"]:
        for layer in chart["layer"][2:]:
            assert "token" in {one["field"] for one in layer["encoding"]["tooltip"]}
    assert "share" not in json.dumps(specs["false"])


def test_many_rows_are_binned_and_the_largest_are_shipped(own, monkeypatch):
    monkeypatch.setattr(rowspage, "MOST_POINTS", 10)
    monkeypatch.setattr(rowspage, "TOP", 2)
    rowspage.write_rows_page(Subject.of(own))
    data = held(own, "data")
    assert data["many"]
    arm = data["arms"]["untied"]
    columns = {name: decoded(text) for name, text in arm["columns"].items()}
    assert arm["top"] == sorted({k for values in columns.values() for k in np.argsort(-values, kind="stable")[:2]})
    lows = [one["low"] for one in arm["bins"] if one["field"] == "pull"]
    assert len(lows) > 5
    assert all(one["low"] <= one["middle"] <= one["high"] for one in arm["bins"])
    assert f"of V = {len(data['ids'])}" in (own / "rows.html").read_text(encoding="utf-8")


def test_what_draws_is_made_once_and_kept_for_this_user(tmp_path, monkeypatch):
    made = []

    def write(folder):
        made.append(folder)
        (folder / rowspage.SPECS).write_text('{"true": {}}')
        (folder / rowspage.LIBRARIES).write_text("// draws")

    monkeypatch.setattr(rowspage, "_write_charts", write)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [rowspage._drawn() for _ in range(2)] == [({"true": {}}, "// draws")] * 2
    assert len(made) == 1
    (kept,) = (tmp_path / "tied_lm" / "pages").iterdir()
    (kept / rowspage.LIBRARIES).write_text("steal()")
    assert rowspage._drawn()[1] == "// draws"
    monkeypatch.setattr(rowspage, "version", lambda library: "another")
    rowspage._drawn()
    assert len(made) == 3


def test_it_asks_nothing_of_any_other_place_and_names_whose_code_it_holds(comparison):
    text = (comparison / "rows.html").read_text(encoding="utf-8")
    assert "connect-src" not in text
    assert "default-src 'none'" in text
    assert not re.findall(r'(?:src|href)="?(?!report\.html)[a-z]', re.sub(r"<script.*?</script>", "", text, flags=re.S))
    assert "University of Washington Interactive Data Lab" in text
    assert text.count("largest pull</summary>") == 3  # without a script


@pytest.mark.parametrize("absent", ["altair", "vl_convert"])
def test_without_the_extra_the_report_says_how_to_get_it(own, monkeypatch, absent):
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == absent else object())
    (own / "rows.html").unlink(missing_ok=True)
    report.write_report(own)
    assert not (own / "rows.html").exists()
    assert "pip install &#x27;tied_lm[page]&#x27;" in page(own)
    assert 'href="rows.html"' not in page(own)
