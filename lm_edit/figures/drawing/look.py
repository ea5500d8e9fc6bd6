"""Colors, markers and texts that static and interactive figures share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from edit_hooks.utils.printable import printable
from lm_edit.figures.drawing.charts import UNSCORED, Bars, Chart, Lines, Network, Points
from lm_edit.figures.drawing.style import style

GRAY = "#777777"
TOTAL, RISE, FALL = 0, 2, 3  # colors of the bars of a waterfall
# of matplotlib and of plotly
MARKERS = (
    ("o", "circle"),
    ("s", "square"),
    ("D", "diamond"),
    ("^", "triangle-up"),
    ("v", "triangle-down"),
    ("P", "cross"),
    ("X", "x"),
)
DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))
ROLES = {"start": "#CFE6F5", "end": "#FBE3B5", "other": "#F4F4F4"}
BEND = 0.08  # of the edges of a graph
MAX_NAMED_ROWS = 20  # of a matrix
MAX_TITLE = 200  # characters of titles and of names in the legend
MAX_LABEL = 60  # characters of other texts


class Theme(NamedTuple):
    """Colors of the page and of what is not data.

    Attributes:
        paper: the ground, and the halo of texts over lines. ink: strong lines and texts. number, caption: of these
            texts. grid: of these lines. axes: frames, ticks and labels.
        nodes: role -> ground of a node.
    """

    paper: str
    ink: str
    number: str
    caption: str
    grid: str
    axes: str
    nodes: Mapping[str, str]


LIGHT = Theme("white", "#222222", "#333333", "#444444", "#dddddd", "black", ROLES)
DARK = Theme(
    "#14181e", "#e6e6e6", "#d0d0d0", "#b8b8b8", "#3a4048", "#d0d4da",
    {"start": "#1d3c52", "end": "#5a4715", "other": "#2a2f36"},
)  # fmt: skip


def theme() -> Theme:
    """The theme of the figure that is being drawn."""
    return DARK if style().dark else LIGHT


class EdgeLook(NamedTuple):
    """Color, dash (of matplotlib, of plotly), width in points, and color of its label."""

    color: str
    dash: tuple[str, str]
    width: float
    ink: str


EDGE_LOOKS = (
    EdgeLook("#D55E00", DASHES[0], 1.6, "#A34700"),
    EdgeLook("#999999", DASHES[1], 0.9, "#444444"),
    EdgeLook("#0072B2", DASHES[2], 1.2, "#0072B2"),
)


def color_of(index: int | None) -> str:
    """A color of the palette, which repeats; gray for None."""
    palette = style().colors
    return GRAY if index is None else palette[index % len(palette)]


def marker_of(index: int) -> tuple[str, str]:
    """A marker, of matplotlib and of plotly."""
    return MARKERS[index % len(MARKERS)]


def dash_of(index: int) -> tuple[str, str]:
    """A dash, of matplotlib and of plotly; two lines of one color differ in it."""
    return DASHES[(index + index // len(style().colors)) % len(DASHES)]


def edge_look(panel: Network, kind: str) -> EdgeLook:
    """The look of a kind of edge."""
    return EDGE_LOOKS[list(panel.kinds).index(kind) % len(EDGE_LOOKS)]


def on_edge(start: tuple[float, float], end: tuple[float, float], share: float) -> tuple[float, float]:
    """The point of an edge of a graph at this share of its way.

    Edges are bent, as quadratic Bezier curves, so that two of opposite directions part.
    """
    (x0, y0), (x1, y1) = start, end
    bend = 2 * share * (1 - share) * BEND
    return x0 + share * (x1 - x0) + bend * (y1 - y0), y0 + share * (y1 - y0) - bend * (x1 - x0)


def matrix_step(num_rows: int) -> int:
    """Of how many rows of a matrix one is named: all of a small one."""
    return max(1, math.ceil(num_rows / MAX_NAMED_ROWS))


def text_on(background: str) -> str:
    """Black or white, whichever has more contrast with a color ``#rrggbb``."""
    red, green, blue = (int(background[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return "white" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.25 else "black"


def shown(text: str, limit: int = MAX_LABEL) -> str:
    """A text of users or models on one line, without control characters, shortened in the middle."""
    return printable(" ".join(str(text).split()), limit)


def number(value: float) -> str:
    """A value with the digits that a reader of a figure needs."""
    if math.isnan(value):
        return UNSCORED
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:.2f}"


def legend_names(chart: Chart) -> list[str]:
    """Names of the legend, each once, as they are shown; none where the axes say it all."""
    names: list[str] = []
    for panel in chart.panels:
        if isinstance(panel, Network):
            names += [panel.kinds[edge.kind] for edge in panel.edges]
        elif isinstance(panel, (Bars, Lines)) or (isinstance(panel, Points) and not panel.named):
            names += [series.name for series in panel.series if len(panel.series) > 1 or not isinstance(panel, Bars)]
    for panel in chart.panels:
        if isinstance(panel, (Bars, Lines)):
            names += [reference.name for reference in panel.references]
    return list(dict.fromkeys(shown(name, MAX_TITLE) for name in names))
