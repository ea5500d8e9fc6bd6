"""Charts drawn with plotly, as one HTML file that needs no network."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.storage.files import write_atomically
from lm_edit.figures.drawing.charts import (
    UNSCORED,
    Bars,
    Chart,
    HeatMap,
    Lines,
    Network,
    Panel,
    Points,
    Series,
    Waterfall,
    thinned,
)
from lm_edit.figures.drawing.look import (
    FALL,
    MAX_LABEL,
    MAX_TITLE,
    RISE,
    ROLES,
    TOTAL,
    color_of,
    dash_of,
    edge_look,
    legend_names,
    marker_of,
    matrix_step,
    number,
    on_edge,
    shown,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

WIDTH, ROW = 480, 22  # pixels: of a panel, of a bar
MAX_TICKS = 12  # of the columns of a heat map
MAX_MARKED = 40  # points of a line that have markers
MAX_MATRIX = 680  # pixels that the rows of a matrix take at most
CURVE_STEPS = 12  # straight pieces of a bent edge
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 1rem auto; padding: 0 .75rem; max-width: {width}px; }}
body {{ font-family: system-ui, sans-serif; color: #222; background: #fff; }}
h1 {{ font-size: 1.15rem; margin: 0 0 .3rem; }}
p {{ font-size: .82rem; line-height: 1.45; color: #444; margin: .2rem 0; overflow-wrap: anywhere; }}
.chart {{ overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="chart">{chart}</div>
{caption}
</body>
</html>
"""


def draw_interactive(chart: Chart) -> go.Figure:
    """Draw a chart, without its title and caption, which :func:`write_interactive` puts on the page."""
    from plotly.subplots import make_subplots

    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    heights = [max(map(_panel_height, chart.panels[row * columns : (row + 1) * columns])) for row in range(rows)]
    height = sum(heights) + 90
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[_lines_of(panel.title) for panel in chart.panels],
        row_heights=heights,
        vertical_spacing=min(0.9 / max(1, rows - 1), 105 / height) if rows > 1 else 0.0,
        horizontal_spacing=0.16 if columns > 1 else 0.0,
    )
    for title in figure.layout.annotations:
        title.update(font_size=13, align="left")
    named: set[str] = set()
    for index, panel in enumerate(chart.panels):
        row, column = divmod(index, columns)
        _draw_panel(figure, panel, {"row": row + 1, "col": column + 1}, named)
    figure.update_layout(
        width=WIDTH * (2 if any(isinstance(panel, Network) for panel in chart.panels) else max(columns, 1.3)),
        height=height,
        template="plotly_white",
        barmode="stack" if any(isinstance(panel, Bars) and panel.stacked for panel in chart.panels) else "group",
        showlegend=bool(legend_names(chart)),
        legend={"orientation": "h", "yanchor": "bottom", "y": 1 + 34 / height, "x": 0},
        margin={"l": 20, "r": 20, "t": 60, "b": 20},
        font={"size": 12},
        bargap=0.25,
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def write_interactive(chart: Chart, path: Path) -> Path:
    """Write a chart as .html; equal charts give equal bytes."""
    figure = draw_interactive(chart)
    division = figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        div_id=f"figure-{chart.name}",
        config={"displaylogo": False, "toImageButtonOptions": {"format": "svg", "filename": chart.name}},
    )
    page = PAGE.format(
        title=html.escape(shown(chart.title, 300)),
        width=int(figure.layout.width) + 40,
        chart=division,
        caption="\n".join(f"<p>{html.escape(shown(text, 600))}</p>" for text in chart.sentences),
    )
    write_atomically(path, page)
    return path


def _panel_height(panel: Panel) -> int:
    if isinstance(panel, Bars):
        bars = 1 if panel.stacked else len(panel.series)
        return 90 + int(len(panel.categories) * (bars + 0.6) * ROW)
    if isinstance(panel, Waterfall):
        return 90 + 34 * len(panel.bars())
    if isinstance(panel, HeatMap):
        return 130 + min(34 * len(panel.rows), MAX_MATRIX)
    return 620 if isinstance(panel, Network) else 340


def _text(text: str, limit: int = MAX_LABEL) -> str:
    """A text as plotly shows it, which reads some tags of HTML."""
    return html.escape(shown(text, limit), quote=False)


def _lines_of(title: str) -> str:
    return _wrapped(title, 200, 52)


def _wrapped(text: str, limit: int, width: int) -> str:
    # plotly shows escaped quotes as &quot;
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(shown(text, limit), width))


def _category_axis(names: Sequence[str], step: int = 1) -> dict[str, Any]:
    """Options of an axis whose categories are the positions of the names, of which every ``step``-th is written.

    plotly adds up the bars of equal categories, which names can become when they are shortened; these are written in
    full.
    """
    short = [_text(name) for name in names]
    full = [_wrapped(name, MAX_TITLE, MAX_LABEL) for name in names]
    labels = [one if short.count(one) == 1 else other for one, other in zip(short, full, strict=True)]
    return {"type": "category", "tickvals": list(range(0, len(names), step)), "ticktext": labels[::step]}


def _draw_panel(figure: go.Figure, panel: Panel, cell: dict[str, int], named: set[str]) -> None:
    if isinstance(panel, Bars):
        _draw_bars(figure, panel, cell, named)
    elif isinstance(panel, Waterfall):
        _draw_waterfall(figure, panel, cell)
    elif isinstance(panel, Lines):
        _draw_lines(figure, panel, cell, named)
    elif isinstance(panel, Points):
        _draw_points(figure, panel, cell, named)
    elif isinstance(panel, HeatMap):
        _draw_heat_map(figure, panel, cell)
    else:
        _draw_network(figure, panel, cell, named)


def _legend(name: str, named: set[str]) -> dict[str, Any]:
    """Options that put a name into the legend once, and switch all its traces together."""
    options = {"name": _text(name, MAX_TITLE), "legendgroup": name, "showlegend": name not in named}
    named.add(name)
    return options


def _values(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _errors(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> dict[str, Any] | None:
    if not low:
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": _values([end - value for value, end in zip(values, high, strict=True)]),
        "arrayminus": _values([value - end for value, end in zip(values, low, strict=True)]),
        "thickness": 1,
        "width": 3,
    }


def _hover(series: Series) -> list[str]:
    """Value, interval, number of cases and text of each value."""
    lines = []
    for index, value in enumerate(series.values):
        parts = [f"{value:.4g}" if not math.isnan(value) else series.gaps[index] if series.gaps else UNSCORED]
        if series.low and not math.isnan(series.low[index]):
            parts.append(f"95% interval {series.low[index]:.4g} to {series.high[index]:.4g}")
        if series.counts and series.counts[index] is not None:
            parts.append(f"n = {series.counts[index]}")
        if series.texts:
            parts.append(_text(series.texts[index], 200))
        lines.append(f"{_text(series.name)}<br>" + "<br>".join(parts))
    return lines


def _draw_bars(figure: go.Figure, panel: Bars, cell: dict[str, int], named: set[str]) -> None:
    import plotly.graph_objects as go

    rows = list(range(len(panel.categories)))
    for series in panel.series:
        bar = go.Bar(
            y=rows, x=_values([value - panel.start for value in series.values]), orientation="h",
            base=panel.start or None, marker_color=color_of(series.color),
            error_x=_errors(series.values, series.low, series.high),
            hovertext=_hover(series), hoverinfo="text", text=[number(value) for value in series.values],
            textposition="inside" if panel.stacked else "none", **_legend(series.name, named),
        )  # fmt: skip
        figure.add_trace(bar, **cell)
        for row, value in enumerate(series.values):
            if math.isnan(value):  # a bar without a length has no place for a text
                _write_gap(figure, row, series.gaps[row] if series.gaps else UNSCORED, cell)
    figure.update_yaxes(autorange="reversed", **_category_axis(panel.categories), **cell)
    figure.update_xaxes(title_text=_text(panel.value_label), range=panel.limits, **cell)
    for reference in panel.references:
        color = color_of(reference.color)
        figure.add_vline(x=reference.value, line={"dash": "dash", "color": color, "width": 1.5}, **cell)
        figure.add_trace(_line_sample(reference.name, color, named), **cell)


def _draw_waterfall(figure: go.Figure, panel: Waterfall, cell: dict[str, int]) -> None:
    import plotly.graph_objects as go

    bars = panel.bars()
    totals = (0, len(bars) - 1)
    changes = [end - start for _, start, end in bars]
    kinds = [TOTAL if row in totals else RISE if change >= 0 else FALL for row, change in enumerate(changes)]
    colors = list(map(color_of, kinds))
    texts = [number(end) if row in totals else f"{end - start:+.2f}" for row, (_, start, end) in enumerate(bars)]
    texts = [UNSCORED if math.isnan(change) else text for text, change in zip(texts, changes, strict=True)]
    starts = [0.0 if math.isnan(end - start) else start for _, start, end in bars]
    hover = _hover(panel.values)
    low, high = (tuple(ends) + tuple(ends[-1:]) for ends in (panel.values.low, panel.values.high))
    trace = go.Bar(
        y=list(range(len(bars))), x=_values(changes), base=starts,
        orientation="h", marker_color=colors, text=texts, textposition="outside", hovertext=[*hover, hover[-1]],
        hoverinfo="text", showlegend=False, error_x=_errors([end for _, _, end in bars], low, high),
    )  # fmt: skip
    figure.add_trace(trace, **cell)
    for row, (_, start, end) in enumerate(bars):
        if math.isnan(end - start):
            _write_gap(figure, row, UNSCORED, cell)
    figure.update_yaxes(autorange="reversed", **_category_axis([name for name, _, _ in bars]), **cell)
    figure.update_xaxes(title_text=_text(panel.value_label), range=(panel.limits[0], 1.12 * panel.limits[1]), **cell)


def _write_gap(figure: go.Figure, row: int, gap: str, cell: dict[str, int]) -> None:
    """Write why a bar is missing in its place."""
    figure.add_annotation(
        x=0, y=row, text=_text(gap), showarrow=False, xanchor="left", font={"size": 10, "color": "#777"}, **cell
    )


def _line_sample(name: str, color: str, named: set[str]) -> go.Scatter:
    """An empty trace, which gives a reference line its entry in the legend."""
    import plotly.graph_objects as go

    line = {"dash": "dash", "color": color, "width": 1.5}
    return go.Scatter(x=[None], y=[None], mode="lines", line=line, **_legend(name, named))


def _draw_lines(figure: go.Figure, panel: Lines, cell: dict[str, int], named: set[str]) -> None:
    import plotly.graph_objects as go

    for series in map(thinned, panel.series):
        trace = go.Scatter(
            x=list(series.positions), y=_values(series.values),
            mode="lines" if len(series.values) > MAX_MARKED else "lines+markers",
            line={"color": color_of(series.color), "dash": dash_of(series.style)[1]},
            marker={"symbol": marker_of(series.style)[1], "size": 8},
            error_y=None if panel.bands else _errors(series.values, series.low, series.high),
            hovertext=_hover(series), hoverinfo="text+x", **_legend(series.name, named),
        )  # fmt: skip
        figure.add_trace(trace, **cell)
        if panel.bands and series.low:
            ends = [*zip(series.positions, series.high, strict=True)]
            ends += reversed([*zip(series.positions, series.low, strict=True)])
            known = [end for end in ends if not math.isnan(end[1])]
            band = go.Scatter(
                x=[x for x, _ in known], y=[y for _, y in known], fill="toself", fillcolor=color_of(series.color),
                opacity=0.14, line={"width": 0}, mode="lines", hoverinfo="skip", showlegend=False,
            )  # fmt: skip
            figure.add_trace(band, **cell)
    positions = sorted({position for series in panel.series for position in series.positions})
    figure.update_xaxes(title_text=_text(panel.position_label), type="log" if panel.log_positions else "linear", **cell)
    if panel.whole_positions and len(positions) <= 8:
        figure.update_xaxes(tickvals=positions, **cell)
    figure.update_yaxes(title_text=_text(panel.value_label), range=panel.limits, **cell)
    for reference in panel.references:
        color = color_of(reference.color)
        figure.add_hline(y=reference.value, line={"dash": "dash", "color": color, "width": 1.5}, **cell)
        figure.add_trace(_line_sample(reference.name, color, named), **cell)


def _draw_points(figure: go.Figure, panel: Points, cell: dict[str, int], named: set[str]) -> None:
    import plotly.graph_objects as go

    for series in panel.series:
        trace = go.Scatter(
            x=list(series.positions), y=list(series.values), mode="markers+text" if panel.named else "markers",
            text=[_text(text) for text in series.texts] if panel.named else None, textposition="top right",
            marker={
                "symbol": marker_of(series.style)[1], "size": 10 if panel.named or series.low else 6,
                "color": color_of(series.color),
            },
            error_x=_errors(series.positions, series.position_low, series.position_high),
            error_y=_errors(series.values, series.low, series.high), hovertext=_hover(series), hoverinfo="text",
            **(_legend(series.name, named) | ({"showlegend": False} if panel.named else {})),
        )  # fmt: skip
        figure.add_trace(trace, **cell)
    figure.update_xaxes(title_text=_text(panel.position_label), showticklabels=panel.axes, **cell)
    figure.update_yaxes(title_text=_text(panel.value_label), showticklabels=panel.axes, **cell)


def _draw_heat_map(figure: go.Figure, panel: HeatMap, cell: dict[str, int]) -> None:
    import plotly.graph_objects as go

    width = len(panel.columns)
    axes = figure.get_subplot(**cell)
    right, (bottom, top) = axes.xaxis.domain[1], axes.yaxis.domain
    matrix = [[*_values(row), *[None] * (width - len(row))] for row in panel.values]
    hover = [
        ["" if value is None else
         f"{_text(panel.column_label)}: {_text(column)}<br>{_text(panel.row_label)}: {_text(row)}<br>{value:.4g}"
         for column, value in zip(panel.columns, values, strict=True)]
        for row, values in zip(panel.rows, matrix, strict=True)
    ]  # fmt: skip
    step = max(1, math.ceil(width / MAX_TICKS))
    trace = go.Heatmap(
        z=matrix, x=list(range(width)), y=list(range(len(panel.rows))), colorscale="Purples",
        zmin=panel.limits[0], zmax=panel.limits[1], hoverongaps=False, hovertext=hover, hoverinfo="text",
        colorbar={
            "title": {"text": _text(panel.value_label), "side": "right"},
            "x": right + 0.005, "y": (bottom + top) / 2, "len": top - bottom,
            "thickness": 10,
        },
        text=[["" if value is None else number(value) for value in row] for row in matrix] if panel.annotated else None,
        texttemplate="%{text}" if panel.annotated else None,
    )  # fmt: skip
    figure.add_trace(trace, **cell)
    figure.update_xaxes(title_text=_text(panel.column_label), **_category_axis(panel.columns, step), **cell)
    named = _category_axis(panel.rows, matrix_step(len(panel.rows)))
    figure.update_yaxes(title_text=_text(panel.row_label), autorange="reversed", **named, **cell)


def _draw_network(figure: go.Figure, panel: Network, cell: dict[str, int], named: set[str]) -> None:
    import plotly.graph_objects as go

    places = {node.name: (node.x, node.y) for node in panel.nodes}
    for kind, title in panel.kinds.items():
        edges = [edge for edge in panel.edges if edge.kind == kind]
        if not edges:
            continue
        look = edge_look(panel, kind)
        ends = [(places[edge.source], places[edge.target]) for edge in edges]
        # A marker on each edge carries its text.
        line = {"color": look.color, "dash": look.dash[1], "width": look.width}
        curves = [[on_edge(start, end, step / CURVE_STEPS) for step in range(CURVE_STEPS + 1)] for start, end in ends]
        xs = [x for curve in curves for x in (*(x for x, _ in curve), None)]
        ys = [y for curve in curves for y in (*(y for _, y in curve), None)]
        middles = [on_edge(start, end, 2 / 3) for start, end in ends]
        figure.add_trace(
            go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", **_legend(title, named)), **cell
        )
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in middles], y=[y for _, y in middles],
                mode="markers", hoverinfo="text", showlegend=False, legendgroup=title,
                marker={
                    "size": 8, "color": look.color, "symbol": "arrow",
                    "angle": [math.degrees(math.atan2(x1 - x0, y1 - y0)) for (x0, y0), (x1, y1) in ends],
                },
                hovertext=[
                    "<br>".join(_text(text, 120) for text in (edge.source, edge.label, edge.target)) for edge in edges
                ],
            ),
            **cell,
        )  # fmt: skip
    nodes = go.Scatter(
        x=[node.x for node in panel.nodes], y=[node.y for node in panel.nodes], mode="markers+text", showlegend=False,
        text=[_wrapped(node.name, MAX_LABEL, 22) for node in panel.nodes], hoverinfo="text",
        marker={
            "size": 16, "color": [ROLES[node.role] for node in panel.nodes], "line": {"color": "#555555", "width": 1},
        },
        textposition="top center",
    )  # fmt: skip
    figure.add_trace(nodes, **cell)
    figure.update_xaxes(visible=False, **cell)
    figure.update_yaxes(visible=False, **cell)
