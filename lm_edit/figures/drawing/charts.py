"""Charts as data, independent of the plotting libraries.

A figure function returns a :class:`Chart`. :mod:`lm_edit.figures.drawing.static` draws it with matplotlib and
:mod:`lm_edit.figures.drawing.interactive` with plotly, from the same values. NaN is a value that was not scored: it is
drawn as a gap, never as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from edit_hooks.utils.errors import EditingError, near_misses

Limits: TypeAlias = tuple[float, float]

SHARE: Limits = (0.0, 1.0)
MAX_POINTS = 400  # of a line that are drawn
UNSCORED = "unscored"  # the reason of a gap without another one


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values with one color and one entry of the legend.

    Attributes:
        values: one per category of bars, or the vertical coordinates of lines and points.
        positions: horizontal coordinates of lines and points.
        low, high: ends of the interval of each value; empty without intervals.
        position_low, position_high: the same for the positions, for points.
        counts: number of cases behind each value; empty where there are none.
        texts: a text for each value, beside points.
        gaps: why a value is NaN, written in its place; "unscored" if empty.
        color, style: numbers in the palette, and of marker and dash; the same number is the same look in all panels.
            The color None is gray.
    """

    name: str
    values: Sequence[float]
    positions: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    position_low: Sequence[float] = ()
    position_high: Sequence[float] = ()
    counts: Sequence[int | None] = ()
    texts: Sequence[str] = ()
    gaps: Sequence[str] = ()
    color: int | None = 0
    style: int = 0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference line across a panel, as a rule the unedited model.

    Attributes:
        color: number in the palette; None is gray.
    """

    name: str
    value: float
    color: int | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars: a group per category with a bar per series, or stacked.

    Attributes:
        start: where bars begin that are not stacked.
    """

    title: str
    categories: Sequence[str]
    series: Sequence[Series]
    value_label: str
    references: Sequence[Reference] = ()
    stacked: bool = False
    limits: Limits | None = None
    start: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """A value changed step by step: the first value from 0, a bar for each change, the last value from 0.

    Attributes:
        steps: names of the steps; the first is the start.
        values: the value after each step.
        last: name of the last bar.
    """

    title: str
    steps: Sequence[str]
    values: Series
    last: str
    value_label: str
    limits: Limits

    def bars(self) -> list[tuple[str, float, float]]:
        """Name, start and end of each bar; NaN for a missing value and for the changes to and from it."""
        values = list(self.values.values)
        changes = zip(self.steps[1:], values, values[1:], strict=False)
        return [(self.steps[0], 0.0, values[0]), *changes, (self.last, 0.0, values[-1])]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines; of one with more than :data:`MAX_POINTS` points the extremes are drawn, see :func:`thinned`.

    Attributes:
        bands: intervals are bands instead of whiskers.
        limits: of the values.
    """

    title: str
    series: Sequence[Series]
    position_label: str
    value_label: str
    references: Sequence[Reference] = ()
    log_positions: bool = False
    whole_positions: bool = False
    bands: bool = False
    limits: Limits | None = None


@dataclass(frozen=True, kw_only=True)
class Points:
    """A scatter plot.

    Attributes:
        named: write the texts of the series beside the points.
        axes: False where the coordinates have no unit.
    """

    title: str
    series: Sequence[Series]
    position_label: str
    value_label: str
    named: bool = False
    axes: bool = True


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A matrix of numbers; rows may differ in length.

    Attributes:
        annotated: write each value into its cell.
        limits: ends of the color scale.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    row_label: str
    column_label: str
    value_label: str
    limits: Limits
    annotated: bool = True


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node at (x, y) in the unit square; ``role`` is start, end or other."""

    name: str
    x: float
    y: float
    role: str = "other"


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A directed edge; ``kind`` chooses its look, see :class:`Network`."""

    source: str
    target: str
    label: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """A directed graph.

    Attributes:
        kinds: kind of edge -> its name in the legend; their order gives the looks.
    """

    title: str
    nodes: Sequence[Node]
    edges: Sequence[Edge]
    kinds: dict[str, str]


Panel: TypeAlias = Bars | Waterfall | Lines | Points | HeatMap | Network


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure.

    Attributes:
        name: name of the figure, see :mod:`lm_edit.figures.registry`.
        panels: drawn row by row, ``columns`` in a row.
        caption: sentences below the panels: number of cases, protocol, what the whiskers are.
    """

    name: str
    title: str
    panels: Sequence[Panel]
    caption: Sequence[str] = field(default_factory=tuple)
    columns: int = 2

    @property
    def sentences(self) -> list[str]:
        """The caption, and the points that are missing in lines and scatter plots, by panel and reason.

        A missing bar or cell has the reason in its place.
        """
        missing = []
        for panel in self.panels:
            gaps: dict[str, list[str]] = {}
            for series in panel.series if isinstance(panel, (Lines, Points)) else ():
                for reason, name in _gaps(series, isinstance(panel, Lines)):
                    gaps.setdefault(reason, []).append(name)
            where = f" ({panel.title})" if len(self.panels) > 1 and panel.title else ""
            missing += [f"{reason.capitalize()}{where}: {'; '.join(names)}." for reason, names in gaps.items()]
            long = (
                [series for series in panel.series if len(series.values) > MAX_POINTS]
                if isinstance(panel, Lines)
                else []
            )
            if long:
                most = max(len(series.values) for series in long)
                missing.append(
                    f"Lines of up to {most} points{where} are drawn by the smallest and the largest value of each of "
                    f"{MAX_POINTS // 2} stretches."
                )
        return [*self.caption, *missing]


def thinned(series: Series) -> Series:
    """The points of a line that are drawn: all, or of each stretch the ends of the line, extremes and a gap.

    A line of 10,000 steps has more points than a panel has pixels; means would hide a step that breaks the model.
    """
    number = len(series.values)
    if number <= MAX_POINTS:
        return series
    kept = {0, number - 1}
    for stretch in range(MAX_POINTS // 2):
        places = range(stretch * number // (MAX_POINTS // 2), (stretch + 1) * number // (MAX_POINTS // 2))
        known = [place for place in places if not math.isnan(series.values[place])]
        if known:
            kept |= {min(known, key=series.values.__getitem__), max(known, key=series.values.__getitem__)}
        kept |= set([place for place in places if math.isnan(series.values[place])][:1])
    return _at(series, sorted(kept))


def _gaps(series: Series, has_positions: bool) -> Iterator[tuple[str, str]]:
    """Each reason of gaps, and the name of the series with the positions of these gaps if it has other points."""
    points = list(zip(series.positions or series.values, series.values, strict=True))
    places = [index for index, point in enumerate(points) if any(map(math.isnan, point))]
    reasons = [series.gaps[index] if series.gaps else UNSCORED for index in places]
    for reason in dict.fromkeys(reasons):
        own = [index for index, why in zip(places, reasons, strict=True) if why == reason]
        listed = [f"{points[index][0]:g}" if has_positions else f"point {index + 1}" for index in own]
        yield reason, series.name if len(own) == len(points) else f"{series.name} at {', '.join(listed)}"


def arranged(chart: Chart, order: Sequence[str]) -> Chart:
    """The chart with categories, lines and points of these names first, in this order; colors stay.

    Raises:
        EditingError: for a name that no panel has.
    """
    known = {name for panel in chart.panels for name in _names(panel)}
    for name in order:
        if name not in known:
            accepted = (
                f"In this figure: {', '.join(sorted(known))}." if known else "This figure has no order to choose."
            )
            raise EditingError(f"--order {name}: no such name is drawn.{near_misses(name, known)} {accepted}")
    return replace(chart, panels=[_arranged(panel, list(order)) for panel in chart.panels])


def _names(panel: Panel) -> list[str]:
    """What can be ordered."""
    categories = list(panel.categories) if isinstance(panel, Bars) else []
    return categories + [one.name for one in panel.series] if isinstance(panel, (Bars, Lines, Points)) else []


def _arranged(panel: Panel, order: Sequence[str]) -> Panel:
    if not isinstance(panel, (Bars, Lines, Points)):
        return panel
    series = sorted(panel.series, key=lambda one: _rank(one.name, order))
    if not isinstance(panel, Bars):
        return replace(panel, series=series)
    places = sorted(range(len(panel.categories)), key=lambda place: _rank(panel.categories[place], order))
    return replace(
        panel,
        categories=[panel.categories[place] for place in places],
        series=[_at(one, places) for one in series],
    )


def _rank(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _at(series: Series, places: Sequence[int]) -> Series:
    """The series with the values of these places alone, in this order."""
    columns = ("values", "positions", "low", "high", "position_low", "position_high", "counts", "texts", "gaps")
    found: dict[str, Any] = {
        name: [own[place] for place in places] for name in columns if (own := getattr(series, name))
    }
    return replace(series, **found)
