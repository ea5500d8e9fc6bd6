"""Synthetic against WILD evaluation of the same edits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import SHARE, Bars, Chart, Reference
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    by_model,
    caption,
    first_metric,
    require_edited,
    require_rows,
    run_cells,
    series_of,
    unedited_reference,
    value_label,
)
from lm_edit.figures.spec import FigureSpec

if TYPE_CHECKING:
    from pandas import DataFrame

BENCHMARKS = {"zsre": "ZsRE", "counterfact": "CounterFact", "qaedit": "QAEdit"}
SYNTHETIC = "efficacy_match"
FILTERED = "@wrong_judge"  # the published figures and tables: cases that the unedited model answers wrongly
WILD = (
    f"efficacy_wild_judge{FILTERED}",
    "efficacy_wild_judge",
    "efficacy_wild_em",
    "efficacy_wild_contains",
)

NEEDS = Needs(
    "wild_gap",
    f"the columns {SYNTHETIC} and {' or '.join(WILD)} (or another one by --metric), both over the same population "
    f"(@wrong_judge, @wrong_em or all cases), of the tasks <benchmark>_syn_reliability and "
    f"<benchmark>_wild_reliability of any of {', '.join(BENCHMARKS)}",
    "lm_eval --model edited_hf --tasks qaedit_syn,qaedit_wild --model_args editor=r_rome --output_path results",
    further="as published with --metadata judge=<judge>,population=wrong_judge",
)


def metric_pair(rows: DataFrame, needs: Needs, options: Options) -> tuple[str, str, list[str]]:
    """The synthetic and the WILD column over one population, and sentences about the choice."""
    wild, notes = first_metric(rows, needs, options, WILD)
    filters = [ending for ending in (FILTERED, "@wrong_em") if wild.endswith(ending)]
    if not filters:
        population = "Over all cases; the published numbers are over those that the unedited model answers wrongly"
        return SYNTHETIC, wild, [*notes, f"{population} (population=wrong_judge)."]
    return SYNTHETIC + filters[0], wild, [*notes, "Over the cases that the unedited model answers wrongly."]


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per benchmark and model, two bars per editor."""
    tasks = {name: (f"{name}_syn_reliability", f"{name}_wild_reliability") for name in BENCHMARKS}
    of_tasks = rows[rows["task"].isin([task for pair in tasks.values() for task in pair])]
    synthetic, wild, notes = metric_pair(of_tasks, NEEDS, options)
    chosen = require_rows(of_tasks, NEEDS, [synthetic, wild])
    require_edited(chosen, NEEDS)
    panels, drawn, partial = [], [], []
    for benchmark, title in BENCHMARKS.items():
        for model, group, labels in by_model(chosen[chosen["task"].isin(tasks[benchmark])]):
            if set(group["metric"]) != {synthetic, wild}:
                partial.append(f"{title}, {model}")
                continue
            drawn.append(group)
            series = [
                series_of("synthetic (teacher forcing)", run_cells(group, list(labels), synthetic), color=5),
                series_of(
                    f"WILD ({wild.removeprefix('efficacy_wild_')})", run_cells(group, list(labels), wild), color=3
                ),
            ]
            references: list[Reference] = unedited_reference(group, wild, "unedited, WILD", 3)
            panels.append(
                Bars(
                    title=f"{title}, {model}",
                    categories=list(labels.values()),
                    series=series,
                    value_label=value_label(group, wild, "reliability"),
                    references=references,
                    limits=SHARE,
                )
            )
    if not panels:
        raise NEEDS.missing(f"no benchmark has both {synthetic} and {wild}")
    notes += [f"Not drawn, with one of the two columns only: {'; '.join(partial)}."] if partial else []
    shown = chosen[chosen.index.isin([place for group in drawn for place in group.index])]
    title = "Synthetic and WILD evaluation of the same edits"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=caption(shown, notes=notes))


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="reliability under synthetic and under WILD evaluation",
    published="WILD figure 1",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
