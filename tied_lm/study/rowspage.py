"""Every row on a page of its own: charts that are brushed together, a search, a table that can be sorted."""

import base64
import functools
import json
from typing import Any

import altair as alt
import numpy as np
import vl_convert
from jaxtyping import Float

from tied_lm.bands import NAMES, bands_of
from tied_lm.rows import FIELDS, PARTS
from tied_lm.study.page import folded, html_table, link, paragraph, resource, write_page
from tied_lm.study.palette import part_style
from tied_lm.study.rowfigure import binned, mean_rows
from tied_lm.study.subject import ArmRuns, Subject
from tied_lm.study.summary import REPORT

ROWS_PAGE = "rows.html"
MOST_POINTS = 2000  # rows that are drawn one by one; of more their quantiles, and those that are searched
TOP = 20
ROWS_LAYER = 2  # of a chart, above the two of the bins
LOG = alt.Scale(type="log", nice=False)
BINS = 120  # of the logarithm of the rank
SHAPES = {"^": "triangle-up", "s": "square", "P": "cross", "X": "diamond", "o": "circle"}  # of Vega, for our markers
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"  # by Vega
)
GLOBAL = "window.vegaEmbed = vegaEmbed;"  # what the page's script may call
SPLIT = {"share": "lookup's share", "cosine": "cosine"}


def _parts(arm: ArmRuns) -> list[str]:
    return [part for part in PARTS if arm.untied_from is None or not FIELDS[part].hypothetical]


def _fields(arm: ArmRuns) -> list[str]:
    return [*(SPLIT if arm.untied_from is None else ()), *_parts(arm)]


def _base64(values_V: Float[np.ndarray, "V"]) -> str:
    return base64.b64encode(values_V.astype("<f4").tobytes()).decode()


def _bins(values_V: Float[np.ndarray, "V"], field: str) -> list[dict[str, Any]]:
    known_V = values_V if field in SPLIT else np.where(values_V > 0, values_V, np.nan)
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


def _tooltip(fields: list[str]) -> list[alt.Tooltip]:
    rows = [
        alt.Tooltip("token:N"),
        alt.Tooltip("id:Q"),
        alt.Tooltip("rank:Q"),
        alt.Tooltip("frequency:Q", format=".3g"),
    ]
    return rows + [alt.Tooltip(f"{field}:Q", format=".3g") for field in fields]


def _layer(rows: alt.Chart, hits: alt.Chart, bins: list[alt.Chart]) -> Any:
    return alt.layer(*bins, rows, hits).properties(width=1, height=230)


def _rank() -> alt.X:
    return alt.X(
        "rank:Q", title="rank by frequency", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(tickCount=4)
    )


def _split_chart(field: str, brush: alt.Parameter, tooltip: list[alt.Tooltip]) -> Any:
    """Share or cosine of each row against its rank."""
    domain = [0, 1] if field == "share" else [-1, 1]
    y = alt.Y(f"{field}:Q", title=SPLIT[field], scale=alt.Scale(domain=domain))
    rows = alt.Chart(alt.NamedData("rows")).transform_filter(f"isValid(datum.{field})")
    faint = alt.condition(brush, alt.value(0.75), alt.value(0.08))
    points = rows.mark_circle(size=22, color="var(--arm)").encode(_rank(), y, opacity=faint, tooltip=tooltip)
    ring = alt.Chart(alt.NamedData("hits")).transform_filter(f"isValid(datum.{field})")
    hits = ring.mark_point(size=90, color="var(--ink)").encode(_rank(), y, tooltip=tooltip)
    spread = alt.Chart(alt.NamedData("bins")).transform_filter(f"datum.field == '{field}'")
    middle = alt.Y("middle:Q", title=SPLIT[field], scale=alt.Scale(domain=domain))
    area = spread.mark_area(color="var(--arm)", opacity=0.2).encode(_rank(), alt.Y("low:Q"), alt.Y2("high:Q"))
    line = spread.mark_line(color="var(--arm)").encode(_rank(), middle)
    return _layer(points, hits, [area, line])


def _norm_chart(parts: list[str], brush: alt.Parameter, tooltip: list[alt.Tooltip]) -> Any:
    """The norms of the parts of each row against its rank."""
    legend = alt.Legend(orient="top", columns=3)
    colors = alt.Color(
        "field:N",
        title=None,
        scale=alt.Scale(domain=parts, range=[f"var(--{part})" for part in parts]),
        legend=legend,
    )
    shapes = alt.Shape(
        "field:N",
        title=None,
        scale=alt.Scale(domain=parts, range=[SHAPES[part_style(part).marker] for part in parts]),
        legend=legend,
    )
    y = alt.Y("value:Q", title="row norm, nats / parameter", scale=LOG, axis=alt.Axis(tickCount=5))

    def folded_rows(name: str) -> alt.Chart:
        of = alt.Chart(alt.NamedData(name)).transform_fold(list[Any](parts), as_=["field", "value"])
        return of.transform_filter("datum.value > 0")

    faint = alt.condition(brush, alt.value(0.75), alt.value(0.06))
    points = folded_rows("rows").mark_point(size=18, filled=True)
    hits = folded_rows("hits").mark_point(size=90, color="var(--ink)").encode(_rank(), y, tooltip=tooltip)
    chosen = " || ".join(f"datum.field == '{part}'" for part in parts)
    spread = alt.Chart(alt.NamedData("bins")).transform_filter(chosen)
    area = spread.mark_area(opacity=0.15).encode(_rank(), alt.Y("low:Q"), alt.Y2("high:Q"), colors)
    middle = alt.Y("middle:Q", title="row norm, nats / parameter", scale=LOG, axis=alt.Axis(tickCount=5))
    line = spread.mark_line().encode(_rank(), middle, colors)
    return _layer(points.encode(_rank(), y, colors, shapes, opacity=faint, tooltip=tooltip), hits, [area, line])


@functools.cache
def _chart(tied: bool) -> dict[str, Any]:
    """The charts of an arm, as Vega-Lite; colours are variables of the page, the widths the script sets."""
    parts = [part for part in PARTS if tied or not FIELDS[part].hypothetical]
    tooltip = _tooltip([*(SPLIT if tied else ()), *parts])
    brush = alt.selection_interval(name="brush")
    charts = [_split_chart(field, brush, tooltip) for field in SPLIT] if tied else []
    charts.append(_norm_chart(parts, brush, tooltip))
    chart = alt.concat(*charts, columns=len(charts)).resolve_scale(color="independent", shape="independent")
    text = {"labelColor": "var(--muted)", "titleColor": "var(--ink)", "gridColor": "var(--grid)"}
    line = {"domainColor": "var(--muted)", "tickColor": "var(--muted)"}
    spec = (
        chart.configure(background="transparent", font="system-ui, sans-serif")
        .configure_view(stroke=None)
        .configure_axis(**text, **line)
        .configure_legend(labelColor="var(--ink)", symbolOpacity=1)
        .to_dict()
    )
    # One brush, drawn in any of these views; added to each of them it would be one for each.
    views = list(SPLIT) if tied else ["norms"]
    for name, layered in zip(views, spec["concat"], strict=False):
        layered["layer"][ROWS_LAYER]["name"] = name
    selected = {"type": "interval", "resolve": "global", "encodings": ["x", "y"] if tied else ["x"]}
    return spec | {"params": [{"name": "brush", "select": selected, "views": views}]}


@functools.cache
def _vega() -> str:
    """The libraries that draw, which take a second to be put together."""
    return vl_convert.javascript_bundle(GLOBAL)


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
    data = _data(arms)
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
            f"Drawn with Vega, Vega-Lite and Vega-Embed (altair {alt.__version__}); this file holds all of it.", "note"
        ),
        _json("data", data),
        _json("specs", {str(tied).lower(): _chart(tied) for tied in {arm.untied_from is None for arm in arms}}),
        f"<script>\n/*\n{resource('vega.txt')}*/\n{_vega()}\n</script>",
        f"<script>\n{resource('rows.js')}</script>",
    ]
    write_page(subject.place / ROWS_PAGE, f"Every row: {' against '.join(subject.names)}", parts, POLICY)
