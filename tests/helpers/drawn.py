"""What a static figure shows: the values of its artists, by panel."""

from __future__ import annotations

import math
from typing import Any

from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.drawing.static import draw_static

_latest: list[Any] = []  # chart and figure: tests look at one chart several times


def figure_of(chart: Chart) -> Any:
    """The chart as a matplotlib figure."""
    if not _latest or _latest[0] is not chart:
        _latest[:] = chart, draw_static(chart)
    return _latest[1]


def bars(chart: Chart, panel: int = 0) -> list[tuple[float, float]]:
    """Start and width of every bar of a panel, in the order of drawing; NaN widths are left out."""
    patches = figure_of(chart).axes[panel].patches
    found = [(patch.get_x(), patch.get_width()) for patch in patches]
    return [(round(start, 6), round(width, 6)) for start, width in found if not math.isnan(width)]


def whiskers(chart: Chart, panel: int = 0) -> list[tuple[float, float]]:
    """Ends of the horizontal whiskers of a panel."""
    segments = [
        segment
        for lines in figure_of(chart).axes[panel].collections
        for segment in lines.get_segments()
        if len(segment)  # empty without an interval
    ]  # fmt: skip
    return [(round(segment[0][0], 6), round(segment[1][0], 6)) for segment in segments]


def lines(chart: Chart, panel: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    """Legend name -> positions and values of each line, those across the panel included."""
    axes = figure_of(chart).axes[panel]
    handles, labels = axes.get_legend_handles_labels()
    found: dict[str, tuple[list[float], list[float]]] = {}
    for handle, label in zip(handles, labels, strict=True):
        line = handle[0] if isinstance(handle, tuple) else handle
        if hasattr(line, "get_xdata"):
            found[label] = (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
    return found


def categories(chart: Chart, panel: int = 0) -> list[str]:
    """Names beside the bars of a panel."""
    return [label.get_text().replace("\n", " ") for label in figure_of(chart).axes[panel].get_yticklabels()]


def texts(chart: Chart, panel: int = 0) -> list[str]:
    """Texts inside a panel."""
    return [text.get_text().strip() for text in figure_of(chart).axes[panel].texts]


def points(chart: Chart, panel: int = 0) -> list[tuple[float, float]]:
    """Points of a scatter plot."""
    found: list[Any] = []
    for collection in figure_of(chart).axes[panel].collections:
        offsets = collection.get_offsets()
        if type(collection).__name__ == "PathCollection":
            found += [(float(x), float(y)) for x, y in offsets]
    return found
