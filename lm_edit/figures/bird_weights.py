"""Effect of the weights of an objective's two extra terms: alpha and beta of BIRD."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edit_hooks.utils.storage.hashing import key_of
from lm_edit.figures.drawing.charts import Chart, Lines, Reference, Series
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    UNEDITED,
    caption,
    edited,
    first_metric,
    log_scale,
    not_drawn,
    require_rows,
    run_cells,
    series_of,
    unedited_reference,
    value_label,
    with_unedited,
)
from lm_edit.figures.spec import FigureSpec
from lm_edit.results.comparing import SETTINGS, name_of
from lm_eval_tasks.report.editor_settings import find_setting, without_setting

if TYPE_CHECKING:
    from pandas import DataFrame

WEIGHTS = ("alpha", "beta")
# Columns in which the runs of a line agree, besides their other settings.
OTHERS = ("model", "task", *(name for name in SETTINGS if name != "settings"))
METRICS = ("reverse_judgment_prob", "reverse_qa_prob", "edit_score_reverse_prob")

NEEDS = Needs(
    "bird_weights",
    "runs of an editor with the settings alpha and beta that differ in one of them, with the column "
    f"{' or '.join(METRICS)} (or another one by --metric)",
    "lm_eval --model edited_hf --tasks bake_j --model_args 'editor=bird,editor_args=alpha:0.001' --output_path results",
    further="and the same with other values of alpha, and of beta",
)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per weight; a line connects the runs that differ in nothing else."""
    has_weights = [
        all(find_setting(config, weight) is not None for weight in WEIGHTS) for config in rows["editor_config"]
    ]
    of_weights = rows.loc[has_weights]
    metric, notes = first_metric(of_weights, NEEDS, options, METRICS)
    chosen = require_rows(rows, NEEDS, [metric])
    runs = edited(chosen[chosen.index.isin(of_weights.index)])
    panels: list[Lines] = []
    connected: set[object] = set()
    for weight in WEIGHTS:
        groups = _groups(runs, weight)
        connected |= {place for group in groups for place in group.index}
        first = sum(len(panel.series) for panel in panels)
        series = [_line(group, runs, weight, metric, color) for color, group in enumerate(groups, start=first)]
        if series:
            values = [position for line in series for position in line.positions]
            panels.append(
                Lines(
                    title=weight,
                    series=series,
                    position_label=weight,
                    value_label=value_label(chosen, metric),
                    references=_references(groups, chosen, metric),
                    log_positions=log_scale(values),
                )
            )
    if not panels:
        raise NEEDS.missing("no two runs differ in alpha alone or in beta alone")
    drawn = runs[runs.index.isin(connected)]
    notes += not_drawn(edited(chosen), drawn, "without a run that differs in alpha alone or in beta alone")
    return Chart(
        name=NEEDS.figure,
        title="Weights of the bidirectional terms",
        panels=panels,
        caption=caption(with_unedited(drawn, chosen), notes=notes),
    )


def _groups(runs: DataFrame, weight: str) -> list[DataFrame]:
    """The runs of every line, which differ in this weight only, sorted by it."""
    values = runs["editor_config"].map(lambda config: float(find_setting(config, weight)))
    others = runs.apply(lambda row: _without(row, weight), axis=1)
    groups = [group.sort_values("weight") for _, group in runs.assign(weight=values).groupby(others, sort=False)]
    return [group for group in groups if group["weight"].nunique() > 1]


def _line(group: DataFrame, runs: DataFrame, weight: str, metric: str, color: int) -> Series:
    cells = run_cells(group, list(group["run"]), metric)
    name = _line_name(group, runs, weight)
    return series_of(name, cells, positions=list(group["weight"]), color=color, style=color)


def _references(groups: Sequence[DataFrame], rows: DataFrame, metric: str) -> list[Reference]:
    """The unedited value of each model and task with a line; named by them where there are several."""
    places = dict.fromkeys((str(group.iloc[0]["model"]), str(group.iloc[0]["task"])) for group in groups)
    varying = [len({place[number] for place in places}) > 1 for number in range(2)]
    found = []
    for place in places:
        own = rows[(rows["model"] == place[0]) & (rows["task"] == place[1])]
        name = ", ".join([UNEDITED, *itertools.compress(place, varying)])
        found += unedited_reference(own, metric, name)
    return found


def _without(row: DataFrame, weight: str) -> str:
    """Key of the runs of a line: all settings but the weight."""
    rest = [str(row[column]) for column in OTHERS]
    return key_of({"config": without_setting(row["editor_config"], weight), "rest": rest})


def _line_name(rows: DataFrame, runs: DataFrame, weight: str) -> str:
    """The other weight, and the names in which the runs differ."""
    first = rows.iloc[0]
    (other,) = (name for name in WEIGHTS if name != weight)
    names = [name_of(first)] if runs.apply(name_of, axis=1).nunique() > 1 else []
    names += [str(first[column]) for column in ("model", "task") if runs[column].nunique() > 1]
    return ", ".join([*names, f"{other} = {find_setting(first['editor_config'], other):g}"])


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="scores by the weights alpha and beta",
    published="BIRD figure 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
