"""Charts drawn with matplotlib, without a display and without global state."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edit_hooks.utils.storage.files import replacing
from lm_edit.figures.drawing.charts import (
    UNSCORED,
    Bars,
    Chart,
    HeatMap,
    Lines,
    Network,
    Panel,
    Points,
    Reference,
    Waterfall,
    thinned,
)
from lm_edit.figures.drawing.layout import DrawnPanel, Movable, TextPlace, fit, legend_columns
from lm_edit.figures.drawing.look import (
    BEND,
    FALL,
    GRAY,
    MAX_TITLE,
    RISE,
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
    text_on,
    theme,
)
from lm_edit.figures.drawing.style import points, style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

PANEL_WIDTH = 3.4  # inches: a column of a paper
NARROWEST_PANEL = 2.2  # inches; a narrower figure has fewer panels in a row
ROW_HEIGHT = 0.16  # of a bar
# of the caption, of the title, of the legend beside its handle
CHARACTERS_PER_INCH, TITLE_CHARACTERS_PER_INCH, LEGEND_CHARACTERS_PER_INCH = 19, 12, 15
CATEGORY_CHARACTERS = 26  # in a line
COLUMN_SPACING, HANDLE_LENGTH = 1.2, 2.2  # of the legend, in units of its font size
CATEGORY_LINE, CAPTION_LINE, TITLE_HEIGHT, HEADING_PAD = 0.125, 0.13, 0.17, 0.2  # inches
BARS_WITH_NUMBERS = 60  # more bars than these have no number beside them
NARROWEST_WITH_NUMBER = 0.07  # part of a stacked bar
MAX_MARKED = 40  # points of a line that have markers
MAX_MATRIX = 5.0  # inches that the rows of a matrix take at most
# Places of an edge's label, preferably nearer to its source, so that labels of opposite edges part.
SHARES_OF_EDGE = (0.36, 0.44, 0.28, 0.52, 0.2, 0.6, 0.68, 0.76)
# Offsets of a name from its point, in points.
NAME_PLACES = (
    TextPlace((4, 3), "left", "bottom"), TextPlace((4, -3), "left", "top"), TextPlace((-4, 3), "right", "bottom"),
    TextPlace((-4, -3), "right", "top"), TextPlace((0, 7), "center", "bottom"), TextPlace((0, -7), "center", "top"),
    TextPlace((10, 10), "left", "bottom"), TextPlace((10, -10), "left", "top"), TextPlace((-10, 10), "right", "bottom"),
    TextPlace((-10, -10), "right", "top"),
)  # fmt: skip
WHISKERS = {"elinewidth": 0.7, "capsize": 1.5}
SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "savefig.dpi": 200,
    "svg.fonttype": "path",  # looks the same without the font
    "svg.hashsalt": "lm-eval-editing",  # element ids are hashes of the content
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a dollar sign is one
}
SIZES = ("font.size", "axes.titlesize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
# Dates make equal figures differ.
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def draw_static(chart: Chart) -> Figure:
    """Draw a chart; all settings are those of this module, not of the user's matplotlib."""
    from matplotlib import style as matplotlib_style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look = style()
    with matplotlib_style.context(["default", _settings()]):
        columns = min(chart.columns, len(chart.panels))
        if look.width:  # of a narrow figure the panels are below each other
            columns = min(columns, max(1, int(look.width / (NARROWEST_PANEL * look.scale))))
        rows = math.ceil(len(chart.panels) / columns)
        usual = max(2, columns) if any(isinstance(panel, Network) for panel in chart.panels) else columns
        width = look.width or PANEL_WIDTH * usual
        heights = [max(map(panel_height, chart.panels[row * columns : (row + 1) * columns])) for row in range(rows)]
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(rows, columns, height_ratios=heights)
        drawn = []
        for index, panel in enumerate(chart.panels):
            axes = figure.add_subplot(grid[divmod(index, columns)])
            texts = _draw_panel(axes, panel)
            drawn.append(DrawnPanel(axes, index // columns, shown(panel.title, MAX_TITLE), *texts))
        lines = caption_lines(chart.sentences, width) if look.caption else []
        if lines:
            figure.supxlabel(
                "\n".join(lines), fontsize=points(6.5), color=theme().caption, x=0.01, ha="left", linespacing=1.35
            )
        text = shown(chart.title, MAX_TITLE) if look.title else ""
        title = textwrap.wrap(text, max(1, int(width * TITLE_CHARACTERS_PER_INCH / look.scale)))
        heading = _add_heading(figure, "\n".join(title), legend_names(chart), width)
        figure.set_size_inches(width, sum(heights) + heading + CAPTION_LINE * look.scale * len(lines))
        fit(figure, drawn)
        if look.height:
            figure.set_size_inches(width, look.height)
    return figure


def write_static(chart: Chart, path: Path) -> Path:
    """Write a chart as .svg, .png or .pdf in the current style; equal charts give equal bytes."""
    from matplotlib import style as matplotlib_style

    figure, file_format = draw_static(chart), path.suffix[1:]
    with (
        replacing(path) as temporary,  # its name does not show the format
        matplotlib_style.context(["default", _settings()]),
    ):
        figure.savefig(temporary, format=file_format, metadata=METADATA[file_format])
    return path


def _settings() -> dict[str, Any]:
    """The settings of matplotlib in the current style."""
    sizes = {name: points(size) for name, size in SETTINGS.items() if name in SIZES}
    font = {"font.family": [style().font, *SETTINGS["font.family"]]} if style().font else {}
    if not style().dark:
        return {**SETTINGS, **sizes, **font}
    ground = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme().paper)
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    return {**SETTINGS, **sizes, **font, **ground, **dict.fromkeys(inked, theme().axes)}


def _whiskers() -> dict[str, Any]:
    return {**WHISKERS, "ecolor": theme().ink}


def caption_lines(caption: Sequence[str], width: float) -> list[str]:
    """The caption in lines for a figure of this width in inches."""
    characters = max(1, int(width * CHARACTERS_PER_INCH / style().scale))
    return [line for text in caption for line in textwrap.wrap(shown(text, 600), characters, break_on_hyphens=False)]


def panel_height(panel: Panel) -> float:
    """Height of a panel in inches, with its axis labels, in the current style."""
    return _usual_height(panel) * max(1.0, style().scale)


def _usual_height(panel: Panel) -> float:
    if isinstance(panel, Bars):
        bars = 1 if panel.stacked else len(panel.series)
        lines = max(wrapped(name, CATEGORY_CHARACTERS).count("\n") + 1 for name in panel.categories)
        return 0.75 + len(panel.categories) * max((bars + 0.6) * ROW_HEIGHT, lines * CATEGORY_LINE)
    if isinstance(panel, Waterfall):
        return 0.75 + 0.26 * len(panel.bars())
    if isinstance(panel, HeatMap):
        return 0.9 + min(0.25 * len(panel.rows), MAX_MATRIX)
    if isinstance(panel, Network):
        return 5.0
    return 2.4


class Texts(NamedTuple):
    """The texts of a panel that :func:`~lm_edit.figures.drawing.layout.fit` has to find room for, see there."""

    numbers: Sequence[Text] = ()
    movable: Sequence[Movable] = ()
    obstacles: Sequence[Text] = ()


def _draw_panel(axes: Axes, panel: Panel) -> Texts:
    if isinstance(panel, Bars):
        return Texts(numbers=_draw_bars(axes, panel))
    if isinstance(panel, Waterfall):
        return Texts(numbers=_draw_waterfall(axes, panel))
    if isinstance(panel, Lines):
        _draw_lines(axes, panel)
    elif isinstance(panel, Points):
        return Texts(movable=_draw_points(axes, panel))
    elif isinstance(panel, HeatMap):
        _draw_heat_map(axes, panel)
    else:
        return _draw_network(axes, panel)
    return Texts()


def _draw_bars(axes: Axes, panel: Bars) -> list[Text]:
    """Draw bars; return the numbers beyond their ends."""
    places = 1 if panel.stacked else len(panel.series)
    thickness = 0.8 / places
    starts = [panel.start] * len(panel.categories)
    with_numbers = len(panel.categories) * places <= BARS_WITH_NUMBERS
    numbers: list[Text] = []
    for place, series in enumerate(panel.series):
        offset = 0.0 if panel.stacked else (place - (places - 1) / 2) * thickness
        rows = [row + offset for row in range(len(panel.categories))]
        lengths = [value - panel.start for value in series.values]
        axes.barh(
            rows, lengths, height=thickness * 0.92, left=starts, color=color_of(series.color),
            label=shown(series.name, MAX_TITLE), xerr=_errors(series.values, series.low, series.high),
            error_kw=_whiskers(), edgecolor=theme().paper, linewidth=0.6 if panel.stacked else 0.0,
        )  # fmt: skip
        for row, value in enumerate(series.values):
            if math.isnan(value):
                numbers.append(_write_gap(axes, rows[row], series.gaps[row] if series.gaps else UNSCORED))
            elif panel.stacked and value >= NARROWEST_WITH_NUMBER:
                middle, ink = starts[row] + value / 2, text_on(color_of(series.color))
                axes.text(middle, rows[row], number(value), ha="center", va="center", fontsize=points(6), color=ink)
            elif with_numbers and not panel.stacked:
                falls = value < panel.start
                end = (series.low if falls else series.high)[row] if series.high else value
                end = value if math.isnan(end) else end
                numbers.append(_write_number(axes, number(value), end, rows[row], leftward=falls))
        if panel.stacked:
            starts = [
                start + (0.0 if math.isnan(value) else value)
                for start, value in zip(starts, series.values, strict=True)
            ]
    _label_bars(axes, panel.categories, panel.value_label)
    if panel.limits:
        axes.set_xlim(*panel.limits)
    _draw_references(axes.axvline, panel.references)
    return [] if panel.stacked else numbers


def _draw_waterfall(axes: Axes, panel: Waterfall) -> list[Text]:
    """Draw the steps; return the numbers beyond their ends."""
    bars, series, numbers = panel.bars(), panel.values, []
    for row, (_, start, end) in enumerate(bars):
        if math.isnan(end - start):
            numbers.append(_write_gap(axes, row, UNSCORED))
            continue
        is_total = row in (0, len(bars) - 1)
        color = color_of(TOTAL if is_total else RISE if end >= start else FALL)
        index = min(row, len(series.values) - 1)
        interval = [[end - series.low[index]], [series.high[index] - end]] if series.low else None
        axes.barh([row], [end - start], height=0.7, left=[start], color=color, xerr=interval, error_kw=_whiskers())
        right = max(start, end, series.high[index] if series.high else end)
        text = number(end) if is_total else f"{end - start:+.2f}"
        numbers.append(_write_number(axes, text, right, row, leftward=False))
        if row < len(bars) - 1:
            axes.plot([end, end], [row - 0.35, row + 1.35], color=GRAY, linewidth=0.5, zorder=0)
    _label_bars(axes, [name for name, _, _ in bars], panel.value_label)
    axes.set_xlim(*panel.limits)
    return numbers


def _label_bars(axes: Axes, names: Sequence[str], value_label: str) -> None:
    axes.set_yticks(range(len(names)), [wrapped(name, CATEGORY_CHARACTERS) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlabel(shown(value_label))
    axes.grid(axis="x", color=theme().grid, linewidth=0.5)


def _write_number(axes: Axes, text: str, end: float, place: float, *, leftward: bool) -> Text:
    """Write a number beyond the end of a bar and its whisker."""
    return axes.annotate(
        text, (end, place), xytext=(-2 if leftward else 2, 0), textcoords="offset points", va="center",
        ha="right" if leftward else "left", fontsize=points(5.5), color=theme().number, annotation_clip=False,
        bbox={"facecolor": theme().paper, "edgecolor": "none", "pad": 0.4, "alpha": 0.8},
    )  # fmt: skip


def _write_gap(axes: Axes, place: float, reason: str) -> Text:
    return axes.text(0.0, place, f" {reason}", va="center", fontsize=points(5.5), color=GRAY, style="italic")


def _draw_references(draw_line: Callable[..., object], references: Sequence[Reference]) -> None:
    for reference in references:
        name = shown(reference.name, MAX_TITLE)
        draw_line(reference.value, color=color_of(reference.color), linestyle="--", linewidth=1.0, label=name)


def _errors(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]] | None:
    """Lengths of the whiskers to both sides; NaN draws none."""
    if not low:
        return None
    return [
        [value - end for value, end in zip(values, low, strict=True)],
        [end - value for value, end in zip(values, high, strict=True)],
    ]


def _draw_lines(axes: Axes, panel: Lines) -> None:
    for series in map(thinned, panel.series):
        is_long = len(series.values) > MAX_MARKED
        axes.errorbar(
            series.positions, series.values,
            yerr=None if panel.bands else _errors(series.values, series.low, series.high),
            color=color_of(series.color), marker="" if is_long else marker_of(series.style)[0],
            linestyle=dash_of(series.style)[0], label=shown(series.name, MAX_TITLE), capsize=2, elinewidth=0.7,
            markeredgecolor=theme().paper, markeredgewidth=0.4, linewidth=0.9 if is_long else None,
        )  # fmt: skip
        if panel.bands and series.low:
            axes.fill_between(
                series.positions, series.low, series.high, color=color_of(series.color), alpha=0.14, linewidth=0
            )
    _draw_references(axes.axhline, panel.references)
    axes.set_xlabel(shown(panel.position_label))
    axes.set_ylabel(shown(panel.value_label))
    axes.grid(color=theme().grid, linewidth=0.5)
    positions = sorted({position for series in panel.series for position in series.positions})
    if panel.log_positions:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    elif not panel.whole_positions:
        axes.locator_params(axis="x", nbins=4)  # small numbers are wide
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.whole_positions and len(positions) <= 8:
        axes.set_xticks(positions, [f"{position:g}" for position in positions])
        axes.minorticks_off()
    if panel.limits:
        margin = 0.04 * (panel.limits[1] - panel.limits[0])
        axes.set_ylim(panel.limits[0] - margin, panel.limits[1] + margin)


def _draw_points(axes: Axes, panel: Points) -> list[Movable]:
    """Draw points; return the names beside them."""
    names: list[Movable] = []
    for series in panel.series:
        has_errors = bool(series.low or series.position_low)
        marker = marker_of(series.style)[0]
        if has_errors:
            axes.errorbar(
                series.positions, series.values, yerr=_errors(series.values, series.low, series.high),
                xerr=_errors(series.positions, series.position_low, series.position_high), linestyle="none",
                color=color_of(series.color), elinewidth=0.6, capsize=1.5, zorder=2,
            )  # fmt: skip
        size, alpha = (26, 1.0) if panel.named or has_errors else (9, 0.75)
        axes.scatter(
            series.positions, series.values, s=size, marker=marker, color=color_of(series.color), linewidths=0.3,
            edgecolors=theme().paper, label=shown(series.name, MAX_TITLE), zorder=3, alpha=alpha,
        )  # fmt: skip
        if panel.named:
            for x, y, text in zip(series.positions, series.values, series.texts, strict=True):
                place = NAME_PLACES[0].position
                name = axes.annotate(shown(text), (x, y), xytext=place, textcoords="offset points", fontsize=points(6))
                name.set_in_layout(False)
                names.append(Movable(name, NAME_PLACES))
    axes.set_xlabel(shown(panel.position_label))
    axes.set_ylabel(shown(panel.value_label))
    if panel.axes:
        axes.grid(color=theme().grid, linewidth=0.5)
        axes.margins(0.15)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    return names


def _draw_heat_map(axes: Axes, panel: HeatMap) -> None:
    width = len(panel.columns)
    matrix = [[*row, *[math.nan] * (width - len(row))] for row in panel.values]
    low, high = panel.limits
    image = axes.imshow(matrix, aspect="auto", interpolation="nearest", cmap="Purples", vmin=low, vmax=high)
    if panel.annotated:
        for row, values in enumerate(panel.values):
            for column, value in enumerate(values):
                dark = not math.isnan(value) and (value - low) / ((high - low) or 1) > 0.55
                text = "-" if math.isnan(value) else number(value)
                axes.text(
                    column,
                    row,
                    text,
                    ha="center",
                    va="center",
                    fontsize=points(6),
                    color="white" if dark else "#222222",
                )
    step = max(1, math.ceil(width / 12))
    axes.set_xticks(range(0, width, step), [shown(name) for name in panel.columns[::step]])
    step = matrix_step(len(panel.rows))
    axes.set_yticks(range(0, len(panel.rows), step), [shown(name) for name in panel.rows[::step]])
    axes.set_xlabel(shown(panel.column_label))
    axes.set_ylabel(shown(panel.row_label))
    # The aspect is the length of the bar by its width.
    axes.figure.colorbar(image, ax=axes, label=shown(panel.value_label), aspect=8 * panel_height(panel))


def _draw_network(axes: Axes, panel: Network) -> Texts:
    places = {node.name: (node.x, node.y) for node in panel.nodes}
    boxes, names, labels = {}, [], []
    for node in panel.nodes:
        text = axes.text(
            node.x, node.y, wrapped(node.name, 16), fontsize=points(6), ha="center", va="center", zorder=4,
            bbox={
                "boxstyle": "round,pad=0.25", "facecolor": theme().nodes[node.role], "edgecolor": "#555555",
                "linewidth": 0.6,
            },
        )  # fmt: skip
        boxes[node.name] = text.get_bbox_patch()
        names.append(text)
    for edge in panel.edges:
        look = edge_look(panel, edge.kind)
        axes.annotate(
            "", xy=places[edge.target], xytext=places[edge.source], zorder=3,
            arrowprops={
                "arrowstyle": "-|>", "color": look.color, "linestyle": look.dash[0], "linewidth": look.width,
                "patchA": boxes[edge.source], "patchB": boxes[edge.target], "shrinkA": 1, "shrinkB": 1,
                "connectionstyle": f"arc3,rad={BEND}",
            },
        )  # fmt: skip
        if edge.label:
            along = [TextPlace(on_edge(places[edge.source], places[edge.target], share)) for share in SHARES_OF_EDGE]
            text = axes.text(
                *along[0].position, shown(edge.label, 28), fontsize=points(5.5), color=look.ink, zorder=3.5,
                bbox={"boxstyle": "round,pad=0.1", "facecolor": theme().paper, "edgecolor": "none", "alpha": 0.85},
            )  # fmt: skip
            labels.append(Movable(text, along))
    for kind in dict.fromkeys(edge.kind for edge in panel.edges):
        look, name = edge_look(panel, kind), shown(panel.kinds[kind])
        axes.plot([], [], color=look.color, linestyle=look.dash[0], linewidth=look.width, label=name)
    axes.set_xlim(-0.08, 1.08)
    axes.set_ylim(-0.03, 1.03)
    axes.set_axis_off()
    return Texts(movable=labels, obstacles=names)


def _add_heading(figure: Figure, title: str, names: Sequence[str], width: float) -> float:
    """Add the title with the legend below it, above all panels; return their height in inches."""
    from matplotlib.container import ErrorbarContainer

    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            # Without the whiskers of a line, which would cross the samples of other lines.
            entries.setdefault(label, handle[0] if isinstance(handle, ErrorbarContainer) else handle)
    drawn = [name for name in names if name in entries]
    if not drawn:
        figure.suptitle(title, fontsize=points(9), fontweight="bold", x=0.01, ha="left")
        return HEADING_PAD + TITLE_HEIGHT * style().scale * (title.count("\n") + 1)
    characters = max(1, int(width * LEGEND_CHARACTERS_PER_INCH / style().scale))
    texts = [wrapped(name, characters) for name in drawn]
    handles = [entries[name] for name in drawn]
    measured = figure.legend(handles, texts)
    beside = (COLUMN_SPACING + HANDLE_LENGTH + 0.8) * points(SETTINGS["legend.fontsize"]) / 72
    widths = [text.get_window_extent().width / figure.dpi + beside for text in measured.get_texts()]
    measured.remove()
    # As the title of the legend: a title of the figure would be drawn over a legend outside of the panels.
    legend = figure.legend(
        handles, texts, title=title or None, title_fontproperties={"weight": "bold", "size": points(9)},
        loc="outside upper left", alignment="left", ncols=legend_columns(widths, width - HEADING_PAD),
        columnspacing=COLUMN_SPACING, handlelength=HANDLE_LENGTH,
    )  # fmt: skip
    return HEADING_PAD + legend.get_window_extent().height / figure.dpi


def wrapped(text: str, width: int) -> str:
    """A text in lines of at most this many characters."""
    return "\n".join(textwrap.wrap(shown(text, MAX_TITLE), width, break_on_hyphens=False))
