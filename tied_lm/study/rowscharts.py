"""The charts of rows.html and the libraries that draw them, which are the same on every such page."""

from typing import Any

import altair as alt
import vl_convert

from tied_lm.rows import FIELDS, PARTS
from tied_lm.study.palette import part_style
from tied_lm.study.splitfigure import WORDS

ROWS_LAYER = 2  # of a chart, above the two of the bins
LOG = alt.Scale(type="log", nice=False)
SHAPES = {"^": "triangle-up", "s": "square", "P": "cross", "X": "diamond", "o": "circle"}  # of Vega, for our markers
GLOBAL = "window.vegaEmbed = vegaEmbed;"  # what the page's script may call


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
    y = alt.Y(f"{field}:Q", title=WORDS[field], scale=alt.Scale(domain=domain))
    rows = alt.Chart(alt.NamedData("rows")).transform_filter(f"isValid(datum.{field})")
    faint = alt.condition(brush, alt.value(0.75), alt.value(0.08))
    points = rows.mark_circle(size=22, color="var(--arm)").encode(_rank(), y, opacity=faint, tooltip=tooltip)
    ring = alt.Chart(alt.NamedData("hits")).transform_filter(f"isValid(datum.{field})")
    hits = ring.mark_point(size=90, color="var(--ink)").encode(_rank(), y, tooltip=tooltip)
    spread = alt.Chart(alt.NamedData("bins")).transform_filter(f"datum.field == '{field}'")
    middle = alt.Y("middle:Q", title=WORDS[field], scale=alt.Scale(domain=domain))
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


def _chart(tied: bool) -> dict[str, Any]:
    """The charts of an arm, as Vega-Lite; colours are variables of the page, the widths the script sets."""
    parts = [part for part in PARTS if tied or not FIELDS[part].hypothetical]
    tooltip = _tooltip([*(WORDS if tied else ()), *parts])
    brush = alt.selection_interval(name="brush")
    charts = [_split_chart(field, brush, tooltip) for field in WORDS] if tied else []
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
    views = list(WORDS) if tied else ["norms"]
    for name, layered in zip(views, spec["concat"], strict=False):
        layered["layer"][ROWS_LAYER]["name"] = name
    selected = {"type": "interval", "resolve": "global", "encodings": ["x", "y"] if tied else ["x"]}
    return spec | {"params": [{"name": "brush", "select": selected, "views": views}]}


def charts() -> dict[str, Any]:
    """Those of a tied arm ("true") and of an untied one."""
    return {str(tied).lower(): _chart(tied) for tied in (True, False)}


def libraries() -> str:
    """What draws them, which takes seconds to be put together."""
    return vl_convert.javascript_bundle(GLOBAL)
