"""Layout: nothing is cut, nothing covers anything else, and an editor looks the same in every figure."""

from __future__ import annotations

import io
import math
from itertools import combinations

import pytest
from result_rows import frame, row

from lm_edit.figures.bake import bake_answers, bake_logprob
from lm_edit.figures.drawing.charts import Bars, Chart, HeatMap, Lines, Points, Reference, Series
from lm_edit.figures.drawing.layout import legend_columns
from lm_edit.figures.drawing.look import MARKERS, color_of, dash_of
from lm_edit.figures.drawing.style import PALETTE
from lm_edit.figures.select import by_model, log_scale, run_looks, value_label
from lm_edit.figures.thinkedit import thinkedit_ifr, thinkedit_tradeoff
from lm_edit.figures.wild import wild_grid

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from drawn import figure_of, texts
from matplotlib import style

from lm_edit.figures.drawing.static import SETTINGS, panel_height

MODEL = "an-organization/A-Model-With-A-Long-Name-8B-Instruct"
EDITORS = ["alphaedit", "ft_l", "memit", "rome", "wise"]


def extents(artists):
    return [artist.get_window_extent() for artist in artists]


def test_titles_end_inside_of_the_figure():
    steps = [
        row(editor, task, column.format(metric="em"), 0.5, model=MODEL)
        for editor in ("rome", "memit")
        for task, column in wild_grid.STEPS.values()
    ]
    figure = figure_of(wild_grid.draw(frame(*steps)))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.replace("\n", " ").replace(" ", "") for title in titles] == [
        f"{name},{MODEL}" for name in ("memit", "rome")
    ]
    assert all("\n" in title for title in titles)
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes]
    assert all(box.x1 <= axes.get_window_extent().x1 + 1 for box, axes in zip(boxes, figure.axes, strict=True))
    assert max(box.y1 for box in boxes) < figure.bbox.y1


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_are_inside_of_their_axes(sign):
    series = Series(
        name="v",
        values=[sign * 1234.0, sign * 0.5],
        low=[sign * 1234.0 - 9, math.nan],
        high=[sign * 1234.0 + 9, math.nan],
    )
    panel = Bars(title="", categories=["an editor with (several, settings)", "b"], series=[series], value_label="")
    axes = figure_of(Chart(name="c", title="t", panels=[panel])).axes[0]
    inside = axes.get_window_extent()
    assert all(box.x0 >= inside.x0 and box.x1 <= inside.x1 + 1 for box in extents(axes.texts))


def test_axes_of_shares_have_no_tick_beyond_one_and_are_equal():
    panels = [
        Bars(title="", categories=["a"], series=[Series(name="v", values=[value])], value_label="", limits=(0.0, 1.0))
        for value in (1.0, 0.1)
    ]
    left, right = figure_of(Chart(name="c", title="t", panels=panels)).axes
    assert left.get_xlim() == right.get_xlim() and left.get_xlim()[1] > 1.0
    assert (left.get_xticks()[0], left.get_xticks()[-1]) == (0.0, pytest.approx(1.0))


def test_entries_of_the_legend_fill_the_fewest_rows():
    assert legend_columns([2.0] * 4, 8.0) == 4
    assert legend_columns([2.0] * 4, 7.0) == 2  # three columns need two rows as well: 2 + 1 + 1
    assert legend_columns([2.0, 1.0, 3.0, 1.0], 5.0) == 2  # max(2, 1) + max(3, 1)
    assert legend_columns([1.0] * 17, 8.0) == 6  # eight columns would have three rows, too
    assert legend_columns([9.0, 1.0], 5.0) == 1


def test_legends_show_whole_names_inside_of_the_figure():
    name = "memit (sequential, 2000 edits, batches of 100, groups of 2, settings 0123abcd, seed {})"
    series = [Series(name=name.format(number), values=[0.5], color=number) for number in range(3)]
    panel = Bars(title="", categories=["a"], series=series, value_label="")
    figure = figure_of(Chart(name="c", title="t", panels=[panel]))
    (legend,) = figure.legends
    assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == [one.name for one in series]
    assert all(box.x1 <= figure.bbox.x1 for box in extents(legend.get_texts()))
    assert all(not one.overlaps(axes.get_window_extent()) for one in extents([legend]) for axes in figure.axes)


def test_names_of_near_points_do_not_cover_each_other():
    places = {"alphaedit": 0.5, "memit": 0.505, "rome": 0.51, "wise": 0.9}
    series = [Series(name=name, values=[0.5], positions=[x], texts=[name]) for name, x in places.items()]
    panel = Points(title="", series=series, position_label="", value_label="", named=True)
    axes = figure_of(Chart(name="c", title="t", panels=[panel])).axes[0]
    assert [text.get_text() for text in axes.texts] == list(places)
    assert not any(one.overlaps(other) for one, other in combinations(extents(axes.texts), 2))


def knowgic(editor, *metrics):
    return [
        row(editor, "knowgic", f"{name}_sampled", 0.5, higher_is_better=not name.startswith("ifr")) for name in metrics
    ]


def test_an_editor_has_one_look_in_all_figures_of_the_same_files():
    """The second editor lacks the columns of one figure; those after it keep their colors."""
    rows = [*knowgic("unedited", "ifr", "ckp", "ifr_1")]
    for editor in EDITORS:
        rows += knowgic(editor, "ifr", "ckp", *(["ifr_1"] if editor != "ft_l" else []))
    lines, points = thinkedit_ifr.draw(frame(*rows)).panels[0], thinkedit_tradeoff.draw(frame(*rows)).panels[0]
    looks = {one.name: (one.color, one.style) for one in points.series}
    assert looks == {**{name: (number, number) for number, name in enumerate(EDITORS)}, "unedited": (None, 0)}
    assert {one.name: (one.color, one.style) for one in lines.series} == {
        name: looks[name] for name in EDITORS if name != "ft_l"
    }
    assert color_of(None) not in PALETTE
    assert (points.position_label, points.value_label) == ("CKP (higher is better)", "IFR (lower is better)")


def test_points_at_one_place_are_named_in_the_legend():
    apart = [row(name, "knowgic", f"{metric}_sampled", 0.2 * place, higher_is_better=False)
             for place, name in enumerate(EDITORS) for metric in ("ifr", "ckp")]  # fmt: skip
    (points,) = thinkedit_tradeoff.draw(frame(*apart)).panels
    assert points.named and texts(thinkedit_tradeoff.draw(frame(*apart)))[:2] == EDITORS[:2]
    near = [one | {"value": 0.01 * one["value"]} if one["editor"] == EDITORS[0] else one for one in apart]
    near += [one | {"editor": "other", "run": "other", "value": 0.01} for one in near[:2]]
    assert not thinkedit_tradeoff.draw(frame(*near)).panels[0].named


def test_a_matrix_of_a_long_stream_has_the_height_of_a_short_one():
    def matrix(steps):
        names = [str(step) for step in range(steps)]
        return HeatMap(
            title="", rows=names, columns=names, values=[[0.5] * steps] * steps, row_label="", column_label="",
            value_label="", limits=(0, 1), annotated=False,
        )  # fmt: skip

    assert panel_height(matrix(200)) == panel_height(matrix(20)) < 6
    axes = figure_of(Chart(name="c", title="t", panels=[matrix(200)])).axes[0]
    assert len(axes.get_yticks()) == 20


def test_runs_of_one_editor_have_looks_of_their_own():
    runs = [row("rome", "t", "m", 1.0, settings=name) for name in ("aaaa", "bbbb")]
    rows = frame(*runs, row("memit", "t", "m", 1.0))
    assert run_looks(rows, by_model(rows)) == {"memit": 0, "rome (settings aaaa)": 1, "rome (settings bbbb)": 2}


def test_lines_of_one_color_differ_in_dash_and_marker():
    for number in range(len(PALETTE)):
        repeated = number + len(PALETTE)
        assert color_of(number) == color_of(repeated) and dash_of(number) != dash_of(repeated)
        assert number % len(MARKERS) != repeated % len(MARKERS)


def test_answers_have_one_color_in_both_figures_of_bake():
    logprobs = [row("rome", "bake_rq", name, -1.0, is_rate=False) for name in bake_logprob.ANSWERS]
    shares = [row("rome", "bake_rq", name, 0.25) for name in bake_answers.KINDS]
    bars, stack = bake_logprob.draw(frame(*logprobs)).panels[0], bake_answers.draw(frame(*shares)).panels[0]
    assert [one.color for one in bars.series] == [one.color for one in stack.series[:2]]


def test_axes_name_the_better_direction_where_it_is_declared():
    rows = frame(
        row("rome", "t", "up", 1.0), row("rome", "t", "down", 1.0, higher_is_better=False),
        row("rome", "t", "neither", 1.0, higher_is_better=None),
    )  # fmt: skip
    assert [value_label(rows, name) for name in ("up", "down", "neither")] == [
        "up (higher is better)", "down (lower is better)", "neither",
    ]  # fmt: skip


def test_small_numbers_at_an_axis_do_not_cover_each_other():
    """BIRD's alpha on the demo model: 1e-4 to 2e-3."""
    series = Series(name="v", values=[0.3, 0.2, 0.1], positions=[0.0001, 0.0005, 0.002])
    panel = Lines(title="alpha", series=[series], position_label="alpha", value_label="score")
    figure = figure_of(Chart(name="c", title="t", panels=[panel]))
    with style.context(["default", SETTINGS]):  # as it is saved: the number of ticks depends on the settings
        figure.savefig(io.BytesIO(), format="png")
    boxes = extents(label for label in figure.axes[0].get_xticklabels() if label.get_text())
    assert len(boxes) >= 3 and all(not first.overlaps(second) for first, second in combinations(boxes, 2))


def test_positions_that_spread_widely_are_on_a_logarithmic_axis():
    assert log_scale([1, 10, 100]) and not log_scale([10, 200]) and not log_scale([0, 1000])


def test_references_may_be_gray():
    reference = Reference(name="unedited", value=0.5)
    panel = Bars(
        title="", categories=["a"], series=[Series(name="v", values=[1.0])], value_label="", references=[reference]
    )
    (line,) = figure_of(Chart(name="c", title="t", panels=[panel])).axes[0].lines
    assert line.get_color() == color_of(None)
