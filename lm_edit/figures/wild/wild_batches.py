"""Reliability of a stream by its number of edits and the number of edits per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import SHARE, Chart, Lines
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    FINAL,
    UNEDITED,
    caption,
    choice_between,
    edited,
    first_metric,
    log_scale,
    require_comparable,
    require_one_line,
    run_cells,
    series_of,
    unedited_reference,
    value_label,
    with_names,
)
from lm_edit.figures.spec import FigureSpec

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS = ("efficacy_wild_judge", "efficacy_wild_em", "efficacy_wild_contains")

NEEDS = Needs(
    "wild_batches",
    "streams (mode=sequential) of one editor that differ in num_edits or edit_batch_size, with the column "
    f"{' or '.join(METRICS)} (or another one by --metric)",
    "lm_eval --model edited_hf --tasks qaedit_wild_reliability --model_args "
    "editor=memit,mode=sequential,edits=qaedit,num_edits=20,edit_batch_size=5 --output_path results",
    further="and the same with other numbers",
)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per editor, task and model; a line per batch size."""
    streams = rows[rows["mode"] == "sequential"]
    metric, notes = first_metric(streams, NEEDS, options, METRICS)
    of_metric = rows[(rows["metric"] == metric) & (rows["stage"] == FINAL)]
    chosen = of_metric[of_metric["run"].isin(set(streams["run"]))]
    places = list(zip(chosen["model"], chosen["task"], strict=True))
    unedited = of_metric[of_metric["editor"] == UNEDITED]
    unedited = unedited[unedited.set_index(["model", "task"]).index.isin(places)]
    # The first num_edits cases are other cases for every num_edits.
    require_comparable(of_metric.loc[chosen.index.union(unedited.index)], NEEDS, varying=("limit",))
    panels, drawn, alone = [], [], []
    all_sizes = sorted(edited(chosen)["edit_batch_size"].fillna(1).unique())
    for (editor, model, task), group in with_names(edited(chosen)).groupby(["name", "model", "task"]):
        title = f"{editor}, {model}, {task}"
        if len(group) < 2:
            alone.append(title)
            continue
        drawn.append(group)
        own = unedited[(unedited["model"] == model) & (unedited["task"] == task)].index
        series = []
        for index, size in enumerate(all_sizes):
            line = group[group["edit_batch_size"].fillna(1) == size].sort_values("num_edits")
            if line.empty:
                continue
            _require_one_each(line, str(editor), size)
            require_one_line(line, NEEDS, f"{editor}, {int(size)} per step,", varying=("edit_batch_size",))
            cells = run_cells(line, list(line["run"]), metric)
            name = f"{int(size)} per step"
            series.append(series_of(name, cells, positions=list(line["num_edits"]), color=index, style=index))
        counts = [position for line in series for position in line.positions]
        panels.append(
            Lines(
                title=title,
                series=series,
                position_label="number of edits",
                value_label=value_label(group, metric),
                references=unedited_reference(of_metric.loc[group.index.union(own)], metric),
                log_positions=log_scale(counts),
                whole_positions=True,
                limits=SHARE,
            )
        )
    if not panels:
        raise NEEDS.missing("no editor has two streams that differ in num_edits or edit_batch_size")
    notes += [f"Not drawn, with one stream only: {'; '.join(alone)}."] if alone else []
    shown = chosen[chosen.index.isin([place for group in drawn for place in group.index])]
    title = "Streams of edits: number of edits and edits per step"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=caption(shown, unedited=False, notes=notes))


def _require_one_each(line: DataFrame, editor: str, size: float) -> None:
    repeated = line[line["num_edits"].duplicated(keep=False)]
    if not repeated.empty:
        number = repeated.iloc[0]["num_edits"]
        same = repeated[repeated["num_edits"] == number]
        raise NEEDS.missing(
            f"{len(same)} streams of {editor} have {int(number)} edits, {int(size)} per step; {choice_between(same)}"
        )


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="streams: reliability by number of edits and batch size",
    published="WILD figure 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
