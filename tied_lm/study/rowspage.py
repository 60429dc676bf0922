"""Every row on a page of its own: charts that are brushed together, a search, a table that can be sorted."""

import base64
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jaxtyping import Float

from tied_lm.bands import NAMES, bands_of
from tied_lm.checks import ConfigError
from tied_lm.config.folder import cache_folder
from tied_lm.data.cache import check, provide
from tied_lm.rows import FIELDS, PARTS
from tied_lm.study.page import folded, html_table, link, paragraph, resource, write_page
from tied_lm.study.rowfigure import binned, mean_rows
from tied_lm.study.splitfigure import WORDS
from tied_lm.study.subject import ArmRuns, Subject
from tied_lm.study.summary import REPORT

ROWS_PAGE = "rows.html"
MOST_POINTS = 2000  # rows that are drawn one by one; of more their quantiles, and those that are searched
TOP = 20
BINS = 120  # of the logarithm of the rank
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"  # by Vega
)
SPECS, LIBRARIES = "charts.json", "vega.js"  # in the cache


def _parts(arm: ArmRuns) -> list[str]:
    return [part for part in PARTS if arm.untied_from is None or not FIELDS[part].hypothetical]


def _fields(arm: ArmRuns) -> list[str]:
    return [*(WORDS if arm.untied_from is None else ()), *_parts(arm)]


def _base64(values_V: Float[np.ndarray, "V"]) -> str:
    return base64.b64encode(values_V.astype("<f4").tobytes()).decode()


def _bins(values_V: Float[np.ndarray, "V"], field: str) -> list[dict[str, Any]]:
    known_V = values_V if field in WORDS else np.where(values_V > 0, values_V, np.nan)
    found = binned(known_V, bins=BINS)
    return [
        {
            "field": field,
            "rank": round(float(rank), 2),
            **dict(zip(("low", "middle", "high"), map(_short, ends), strict=True)),
        }
        for rank, ends in zip(found.rank, found.quantiles.tolist(), strict=True)
    ]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _top(values_V: Float[np.ndarray, "V"]) -> list[int]:
    """Places of the largest values that are defined and not 0."""
    order = np.argsort(-np.nan_to_num(values_V), kind="stable")[:TOP]
    return [int(place) for place in order if values_V[place] > 0]


def _data(arms: list[ArmRuns]) -> dict[str, Any]:
    """What the page's script draws: rows in the order of falling frequency, the same in all arms."""
    first = arms[0].probed[0]
    order = np.argsort(-first.frequency, kind="stable")
    many = order.size > MOST_POINTS
    of_arms = {}
    for arm in arms:
        columns = {field: mean_rows(arm.probed, field) for field in _fields(arm)}
        of_arms[arm.name] = {
            "tied": arm.untied_from is None,
            "color": f"var(--{arm.style.color})",
            "columns": {field: _base64(values) for field, values in columns.items()},
            "bins": [one for field, values in columns.items() for one in _bins(values, field)] if many else [],
            "top": sorted({place for part in _parts(arm) for place in _top(columns[part])}) if many else [],
        }
    return {
        "tokens": [first.strings[k] for k in order],
        "ids": order.tolist(),
        "frequency": _base64(first.frequency[order]),
        "band": [NAMES[band] for band in bands_of(first.frequency)[order]],
        "many": many,
        "arms": of_arms,
    }


def _drawn() -> tuple[dict[str, Any], str]:
    """The charts by whether the arm is tied, and the libraries that draw them: made once for each of their versions,
    and kept in the user's cache, if there is one."""
    made = [version("altair"), version("vl-convert-python"), resource("rowscharts.py"), resource("palette.py"), *PARTS]
    try:
        place = cache_folder() / "pages" / hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]
        provide(place, _write_charts)
        check(place)
        return _read_charts(place)
    except ConfigError:
        with TemporaryDirectory() as folder:
            _write_charts(Path(folder))
            return _read_charts(Path(folder))


def _write_charts(folder: Path) -> None:
    from tied_lm.study.rowscharts import charts, libraries  # here, since altair takes long to load

    (folder / SPECS).write_text(json.dumps(charts()), encoding="utf-8")
    (folder / LIBRARIES).write_text(libraries(), encoding="utf-8")


def _read_charts(folder: Path) -> tuple[dict[str, Any], str]:
    specs, libraries = ((folder / name).read_text(encoding="utf-8") for name in (SPECS, LIBRARIES))
    return json.loads(specs), libraries


def _json(name: str, values: Any) -> str:
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _tops(arm: ArmRuns) -> str:
    """The rows in which each part is largest, as tables, which need no script."""
    first = arm.probed[0]
    order = np.argsort(-first.frequency, kind="stable")
    fields = _fields(arm)
    columns = {field: mean_rows(arm.probed, field) for field in fields}
    tables = []
    for part in _parts(arm):
        rows = [["token", "rank", *fields]]
        for place in _top(columns[part]):
            values = [columns[field][place] for field in fields]
            shown = ["-" if np.isnan(value) else f"{value:.3g}" for value in values]
            rows.append([first.strings[order[place]], f"{place + 1:,}", *shown])
        tables.append(folded(f"{arm.name}: the {TOP} rows with the largest {part}", html_table(rows)))
    return "".join(tables)


CONTROLS = """
<noscript><p class=verdict>Charts, search and table need JavaScript; the largest rows below do not.</p></noscript>
<form id=controls hidden>
<label>Arm <select id=arm></select></label>
<label>Search <input id=find type=search placeholder="token or id" autocomplete=off></label>
<button type=button id=clear>All rows</button> <output id=count></output>
</form>
<div id=charts role=img aria-label="Charts of the rows against their rank; the table has the same values."></div>
<div class=wide><table id=table></table></div>
<p><button type=button id=more hidden>More rows</button></p>
"""


def write_rows_page(subject: Subject) -> None:
    """Write rows.html beside the report. Values are means over the seeds, at the last probe."""
    arms = [arm for arm in subject.arms.values() if arm.probed]
    arms.sort(key=lambda arm: arm.untied_from is not None)  # those first that have a share
    data, (specs, libraries) = _data(arms), _drawn()
    kinds = {str(arm.untied_from is None).lower() for arm in arms}
    drawn = (
        f"More than {MOST_POINTS:,} rows: the charts show the median and the middle 80% of rows of like rank, and as "
        f"points the {TOP} largest rows of each part and what is searched for; the table has all rows."
        if data["many"]
        else "Each point is a row."
    )
    parts = [
        f"<p>{link(REPORT, 'Back to the report')}</p>",
        paragraph(
            f"What lookup and scoring ask of every row of V = {len(data['ids']):,}: mean over seeds, at the last "
            f"probe. {drawn} Drag over the charts of share and cosine to brush rows in all charts and the table.",
            "note",
        ),
        CONTROLS,
        "<h2>The largest rows of each part</h2>",
        *(_tops(arm) for arm in arms),
        paragraph(
            f"Drawn with Vega, Vega-Lite and Vega-Embed (altair {version('altair')}); this file holds all of it.",
            "note",
        ),
        _json("data", data),
        _json("specs", {kind: spec for kind, spec in specs.items() if kind in kinds}),
        f"<script>\n/*\n{resource('vega.txt')}*/\n{libraries}\n</script>",
        f"<script>\n{resource('rows.js')}</script>",
    ]
    write_page(subject.place / ROWS_PAGE, f"Every row: {' against '.join(subject.names)}", parts, POLICY)
