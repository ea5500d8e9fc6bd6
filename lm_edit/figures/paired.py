"""Editors with and without an addition: a panel per column, two bars per editor."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lm_edit.figures.drawing.charts import SHARE, Bars, Chart
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    MISSING,
    Cell,
    caption,
    cell,
    choice_between,
    require_edited,
    require_rows,
    series_of,
    unedited_reference,
    value_label,
    with_unedited,
    without_context,
)
from lm_edit.results.filters import text_of

if TYPE_CHECKING:
    from pandas import DataFrame

WITH, WITHOUT = 0, 1  # colors


@dataclass(frozen=True, kw_only=True)
class PairedFigure:
    """A figure of this kind.

    Attributes:
        columns: column -> its tasks and the title of its panel.
        setting: the addition, as a user sets it.
        is_added: returns for each row whether its run has the addition.
        with_name, without_name: names in the legend.
        only_pairs: leave out editors that have runs of one kind only.
    """

    needs: Needs
    title: str
    columns: Mapping[str, tuple[Sequence[str], str]]
    setting: str
    is_added: Callable[[DataFrame], Sequence[bool]]
    with_name: str
    without_name: str
    only_pairs: bool


class Panel(NamedTuple):
    """A panel: a column of these tasks."""

    metric: str
    tasks: Sequence[str]
    title: str


def draw_pairs(rows: DataFrame, figure: PairedFigure, options: Options = DEFAULTS) -> Chart:
    """Draw the figure; the caption names the editors that have runs of one kind only.

    Args:
        options: ``metric``: any column of the figure's tasks, drawn in place of its columns.
    """
    needs = figure.needs
    of_tasks = rows[rows["task"].isin([task for tasks, _ in figure.columns.values() for task in tasks])]
    wanted = _panels(of_tasks, figure, options)
    chosen = require_rows(of_tasks, needs, [panel.metric for panel in wanted])
    if chosen["model"].nunique() > 1:
        first = shlex.quote(f"model={chosen.iloc[0]['model']}")
        raise needs.missing(f"runs of several models are given; choose with --only {first}")
    edited = require_edited(chosen, needs)
    names = [without_context(*pair) for pair in zip(edited["editor"], edited["icl"], strict=True)]
    runs = edited.assign(added=figure.is_added(edited), editor=names)
    runs = runs.assign(editor=_display_names(runs))
    editors = sorted(set(runs["editor"]))
    both = [name for name in editors if runs[runs["editor"] == name]["added"].nunique() == 2]
    if not both:
        raise needs.missing(f"no editor has runs with and without {figure.setting} (editors: {', '.join(editors)})")
    drawn = both if figure.only_pairs else editors

    def cells(panel: Panel, added: bool) -> list[Cell]:
        of_panel = (runs["metric"] == panel.metric) & runs["task"].isin(panel.tasks)
        of_kind = runs[of_panel & (runs["added"] == added)]
        return [_one(of_kind[of_kind["editor"] == editor], figure, editor, added) for editor in drawn]

    panels = [
        Bars(
            title=panel.title,
            categories=drawn,
            series=[
                series_of(figure.without_name, cells(panel, False), color=WITHOUT),
                series_of(figure.with_name, cells(panel, True), color=WITH),
            ],
            value_label=value_label(chosen, panel.metric),
            references=unedited_reference(chosen[chosen["task"].isin(panel.tasks)], panel.metric),
            limits=SHARE if panel.metric in figure.columns or _is_share(chosen, panel.metric) else None,
        )
        for panel in wanted
    ]
    alone = [name for name in editors if name not in both]
    only = "Not drawn, run" if figure.only_pairs else "Run"
    notes = [f"{only} in one way only: {', '.join(alone)}."] if alone else []
    shown = with_unedited(runs[runs["editor"].isin(drawn)], chosen)
    return Chart(name=needs.figure, title=figure.title, panels=panels, caption=caption(shown, notes=notes))


def _display_names(runs: DataFrame) -> list[str]:
    """For each row the name of its editor in the plan, if all runs of the editor have it; else the editor."""
    labels = {editor: set(group["editor_label"].map(text_of)) for editor, group in runs.groupby("editor")}
    shown = {editor: next(iter(found)) if len(found) == 1 else "" for editor, found in labels.items()}
    return [shown[editor] or str(editor) for editor in runs["editor"]]


def _panels(rows: DataFrame, figure: PairedFigure, options: Options) -> list[Panel]:
    """The panels that some row has; those of the chosen column if there is one."""
    wanted = [Panel(options.metric or column, *place) for column, place in figure.columns.items()]
    present = set(zip(rows["metric"], rows["task"], strict=True))
    panels = [panel for panel in wanted if any((panel.metric, task) in present for task in panel.tasks)]
    if not panels:
        raise figure.needs.missing(f"no run has a column {options.metric or ' or '.join(figure.columns)}")
    return panels


def _is_share(rows: DataFrame, metric: str) -> bool:
    """Whether a column is a share in 0..1, and no magnitude or entropy."""
    return bool(rows[rows["metric"] == metric]["is_rate"].map(bool).all())


def _one(rows: DataFrame, figure: PairedFigure, editor: str, added: bool) -> Cell:
    if len(rows) > 1:
        raise figure.needs.missing(
            f"{len(rows)} runs of {editor} {'with' if added else 'without'} {figure.setting} are given; "
            + choice_between(rows)
        )
    return MISSING if rows.empty else cell(rows)
