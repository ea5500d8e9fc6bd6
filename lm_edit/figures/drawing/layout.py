"""Layout of a drawn matplotlib figure by the measured sizes of its texts.

Sizes are known once the axes have their places: :func:`fit` runs after everything is drawn, with the same result for
equal figures.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lm_edit.figures.drawing.style import points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

TITLE_LINE = 0.15  # inches at the usual font size
PAD = 3.0  # pixels between a text and what is near it


class TextPlace(NamedTuple):
    """A place for a text: its position, in the text's own coordinates, and its alignment."""

    position: tuple[float, float]
    ha: Literal["left", "center", "right"] = "center"
    va: Literal["bottom", "center", "top"] = "center"


class Movable(NamedTuple):
    """A text and its possible places, the preferred one first."""

    text: Text
    places: Sequence[TextPlace]


class DrawnPanel(NamedTuple):
    """Axes of a panel, its row, and the texts that :func:`fit` has to find room for.

    Attributes:
        numbers: texts beyond the ends of bars; the horizontal axis grows until they are inside.
        movable: texts that go to the first of their places where they cover nothing.
        obstacles: texts that they may not cover, besides each other.
    """

    axes: Axes
    row: int
    title: str
    numbers: Sequence[Text] = ()
    movable: Sequence[Movable] = ()
    obstacles: Sequence[Text] = ()


def fit(figure: Figure, panels: Sequence[DrawnPanel]) -> None:
    """Wrap the titles to their axes, and move texts that are cut or cover each other."""
    figure.draw_without_rendering()
    lines: dict[int, int] = {}
    for panel in panels:
        wrapped = _wrap_title(panel)
        lines[panel.row] = max(lines.get(panel.row, 1), wrapped)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + points(TITLE_LINE) * sum(count - 1 for count in lines.values()))
    figure.draw_without_rendering()
    together: dict[tuple[float, float], list[DrawnPanel]] = {}
    for panel in panels:
        _move_apart(panel)
        if panel.numbers:
            together.setdefault(panel.axes.get_xlim(), []).append(panel)
    for group in together.values():
        _make_room(group)


def legend_columns(widths: Sequence[float], room: float) -> int:
    """The number of columns that lets entries of these widths fit in the fewest rows; they fill column by column."""
    for rows in range(1, len(widths)):
        columns = math.ceil(len(widths) / rows)
        size, rest = divmod(len(widths), columns)
        ends = accumulate((size + (column < rest) for column in range(columns)), initial=0)
        if sum(max(widths[start:end]) for start, end in pairwise(ends)) <= room:
            return columns
    return 1


def _wrap_title(panel: DrawnPanel) -> int:
    """Wrap a title to the width between the left end of its axes and the right end of the panel; return its lines."""
    if not panel.title:
        return 1
    title = panel.axes.set_title(panel.title, loc="left")
    extent, axes = title.get_window_extent(), panel.axes.get_window_extent()
    characters = max(8, int(len(panel.title) * axes.width / extent.width))
    lines = textwrap.wrap(panel.title, characters, break_on_hyphens=False)
    title.set_text("\n".join(lines))
    return len(lines)


def _make_room(panels: Sequence[DrawnPanel]) -> None:
    """Widen the horizontal axis of panels with the same limits until all numbers are inside."""
    first, last = panels[0].axes.get_xlim()
    for _ in range(4):  # the numbers keep their size, so one step is not enough
        low, high = panels[0].axes.get_xlim()
        left = right = 0.0  # in the unit of the axis
        for panel in panels:
            inside = panel.axes.get_window_extent()
            unit = (high - low) / inside.width
            for text in panel.numbers:
                extent = text.get_window_extent()
                if text.get_horizontalalignment() == "right":
                    left = max(left, unit * (inside.x0 + PAD - extent.x0))
                right = max(right, unit * (extent.x1 - inside.x1))
        if not left and not right:
            break
        for panel in panels:
            panel.axes.set_xlim(low - 1.1 * left, high + 1.1 * right)
    rounding = 1e-6 * (last - first)
    for panel in panels:
        ticks = panel.axes.get_xticks()
        panel.axes.set_xticks([tick for tick in ticks if first - rounding <= tick <= last + rounding])


def _move_apart(panel: DrawnPanel) -> None:
    placed = [text.get_window_extent() for text in panel.obstacles] + _boxes_of_points(panel.axes)
    inside = panel.axes.get_window_extent()
    for text, places in panel.movable:
        best = min(places, key=lambda place: _covered(_extent_at(text, place), placed, inside))
        placed.append(_extent_at(text, best))


def _boxes_of_points(axes: Axes) -> list[Bbox]:
    """Boxes of the markers and whiskers of a scatter plot."""
    from matplotlib.collections import LineCollection, PathCollection
    from matplotlib.transforms import Bbox

    ends: list[Any] = []  # start and end in pixels
    for collection in axes.collections:
        if isinstance(collection, PathCollection):
            ends += [(place, place) for place in axes.transData.transform(collection.get_offsets())]
        elif isinstance(collection, LineCollection):
            ends += [axes.transData.transform(segment) for segment in collection.get_segments() if len(segment)]
    return [Bbox([start - PAD, end + PAD]) for start, end in ends]


def _extent_at(text: Text, place: TextPlace) -> Bbox:
    text.set_position(place.position)
    text.set_horizontalalignment(place.ha)
    text.set_verticalalignment(place.va)
    return text.get_window_extent().padded(PAD / 2)


def _covered(extent: Bbox, placed: Sequence[Bbox], inside: Bbox) -> float:
    """Area in pixels that a text would share with others, or have outside of its axes."""
    shared = sum(_common_area(extent, other) for other in placed)
    return shared + extent.width * extent.height - _common_area(extent, inside)


def _common_area(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0
