"""General ability by number of edits, with and without EVK-Align."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import SHARE, Chart, Lines, Series
from lm_edit.figures.evk.evk_align import is_aligned
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    caption,
    choice_between,
    log_scale,
    not_drawn,
    require_edited,
    require_one_line,
    require_rows,
    run_cells,
    series_of,
    source_of_edits,
    unedited_reference,
    value_label,
    with_names,
    with_unedited,
)
from lm_edit.figures.spec import FigureSpec

if TYPE_CHECKING:
    from pandas import DataFrame

TASKS = {
    "editglue_sst2": "SST-2",
    "editglue_mrpc": "MRPC",
    "editglue_mmlu": "MMLU",
    "editglue_rte_inverted": "RTE, labels as released",
    "editglue_cola": "CoLA",
    "editglue_nli": "NLI",
    "editglue_rte": "RTE",
}
METRIC = "f1"

NEEDS = Needs(
    "evk_glue",
    f"streams or batches of edits with tasks of the group editglue (column {METRIC}, or another one by --metric)",
    "lm_eval --model edited_hf --tasks editglue --model_args "
    "'editor=r_rome,mode=sequential,edits=counterfact,num_edits=5,editor_args=evk_align:true' --output_path results",
    further="and the same with other num_edits, and without editor_args; or lm-edit sweep evk_figure3",
)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per task; a line per editor over the number of edits: color by editor, marker and dash by EVK-Align."""
    metric = options.metric or METRIC
    chosen = require_rows(rows, NEEDS, [metric], tasks=list(TASKS))
    every = require_edited(chosen, NEEDS)
    runs = every[every["num_edits"].notna() & every["group_size"].isna()]
    if runs.empty:
        raise NEEDS.missing(
            "no run has num_edits without group_size: single edits and groups leave these tasks to the unedited model"
        )
    if len(edits := sorted(set(runs["edits"].fillna("").map(source_of_edits)))) > 1:
        last = shlex.quote(f"edits={edits[-1]}")
        raise NEEDS.missing(f"the runs have different edits ({', '.join(edits)}); choose with --only {last}")
    if runs["model"].nunique() > 1:
        first = shlex.quote(f"model={runs.iloc[0]['model']}")
        raise NEEDS.missing(f"runs of several models are given; choose with --only {first}")
    shown = with_unedited(runs, chosen)
    runs = with_names(runs.assign(aligned=is_aligned(runs)))
    panels = []
    for task, title in TASKS.items():
        of_task = runs[runs["task"] == task]
        if not of_task.empty:
            panels.append(
                Lines(
                    title=title,
                    series=_lines(of_task, metric, sorted(set(runs["name"]))),
                    position_label="number of edits",
                    value_label=value_label(of_task, metric),
                    references=unedited_reference(shown[shown["task"] == task], metric),
                    log_positions=log_scale(list(of_task["num_edits"])),
                    whole_positions=True,
                    limits=SHARE if metric.startswith("f1") else None,
                )
            )
    notes = not_drawn(every, runs, "without a number of edits on one model")
    title = "General ability by number of edits"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=caption(shown, notes=notes), columns=2)


def _lines(rows: DataFrame, metric: str, editors: Sequence[str]) -> list[Series]:
    """The lines of a task; ``editors`` are those of the figure, whose places give the colors."""
    series = []
    for (editor, aligned), group in rows.groupby(["name", "aligned"]):
        line = group.sort_values("num_edits")
        repeated = line[line["num_edits"].duplicated()]
        if not repeated.empty:
            number = repeated.iloc[0]["num_edits"]
            same = line[line["num_edits"] == number]
            raise NEEDS.missing(f"several runs of {editor} have {int(number)} edits; {choice_between(same)}")
        name = f"{editor}{' + EVK-Align' if aligned else ''}"
        require_one_line(line, NEEDS, name)
        cells = run_cells(line, list(line["run"]), metric)
        look = {"color": editors.index(str(editor)), "style": int(aligned)}
        series.append(series_of(name, cells, positions=list(line["num_edits"]), **look))
    return series


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="general ability (GLUE, MMLU) by number of edits, with and without EVK-Align",
    published="EVK figure 3",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
