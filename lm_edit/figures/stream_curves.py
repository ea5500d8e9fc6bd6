"""Streams over their checkpoints: retained scores, those right after each edit, and the drift of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lm_edit.figures.drawing.charts import SHARE, Chart, Lines, Series
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    FINAL,
    Cell,
    caption,
    cell,
    edited,
    edited_labels,
    log_scale,
    require_comparable,
    series_of,
    unedited_reference,
    value_label,
    with_unedited,
)
from lm_edit.figures.spec import FigureSpec
from lm_edit.results.statistics.case_scores import read_case_scores
from lm_edit.results.statistics.of_rows import Summary, estimate

if TYPE_CHECKING:
    from pandas import DataFrame

IMMEDIATE = "immediate"
ROLES = ("efficacy", "unchanged")  # of the columns that are drawn without --metric
RETAINED_DASH, IMMEDIATE_DASH = 0, 1
DRIFTS = {
    "norm_ratio": ("Drift of the weights", "norm of the change / norm of the weights"),
    "probe_loss": ("Drift on a plain sentence", "loss per token in nats"),
}

NEEDS = Needs(
    "stream_curves",
    "streams with checkpoints, and a column at them (of success or of locality, or another one by --metric); with "
    "samples, the scores right after each edit are drawn over the same cases",
    "lm_eval --model edited_hf --tasks bake_es,bake_ls --limit 16 --log_samples --output_path results --model_args "
    "'editor=ft_m,mode=sequential,edits=bake,num_edits=16,edit_batch_size=1,checkpoints=2;4;8;16'",
)


class Streams(NamedTuple):
    """What the figure reads.

    Attributes:
        rows: results. cases: scores of single cases. steps: of the streams.
    """

    rows: DataFrame
    cases: DataFrame
    steps: DataFrame


def draw(found: Streams, options: Options = DEFAULTS) -> Chart:
    """A panel per model, task and column over the checkpoints, and panels of the drift after every step."""
    rows = edited(found.rows)
    rows = rows[rows["stage"].map(str.isdigit)]
    if rows.empty:
        raise NEEDS.missing("no run is a stream with checkpoints")
    if options.metric and options.metric not in set(rows["metric"]):
        raise NEEDS.missing(f"no stream has the column {options.metric} at a checkpoint")
    chosen = rows[rows["metric"] == options.metric] if options.metric else _first_columns(rows)
    require_comparable(chosen, NEEDS, varying=("limit",))
    labels = edited_labels(chosen)
    looks = {label: number for number, label in enumerate(dict.fromkeys(labels.values()))}
    panels = []
    for (model, task, metric), group in chosen.groupby(["model", "task", "metric"], sort=False):
        final = found.rows[(found.rows["task"] == task) & (found.rows["metric"] == metric)]
        final = final[(final["stage"] == FINAL) & (final["model"] == model)]
        series = [
            one
            for run in labels
            if not (own := group[group["run"] == run]).empty
            for one in _lines(own, found, labels[run], looks[labels[run]])
        ]
        panels.append(
            Lines(
                title=f"{task}, {model}",
                series=series,
                position_label="number of edits",
                value_label=value_label(group, str(metric)),
                references=unedited_reference(final, str(metric)),
                log_positions=log_scale([float(stage) for stage in group["stage"]]),
                whole_positions=True,
                bands=True,
                limits=SHARE if bool(group["is_share"].all()) else None,
            )
        )
    drawn = with_unedited(chosen, found.rows[found.rows["metric"].isin(set(chosen["metric"]))])
    notes = [
        "Solid: all cases edited by then, asked after that many edits. Dashed: the same cases, each right after its "
        "own edit; without samples, only the mean of all.",
    ]
    if drifts := list(_drift(found.steps, labels, looks)):
        panels += drifts
        notes.append("Drift: after every step of the stream; both are of the model, not of cases.")
    text = [sentence.replace("Whiskers:", "Bands:") for sentence in caption(drawn, notes=notes)]
    return Chart(name=NEEDS.figure, title="Streams of edits over their checkpoints", panels=panels, caption=text)


def _first_columns(rows: DataFrame) -> DataFrame:
    """The rows of each task's first column of success, else of locality; of a task without either, of its first one."""
    metrics = {}
    for task, group in rows.groupby("task", sort=False):
        by_role = [name for role in ROLES for name in group[(group["role"] == role) & group["is_share"]]["metric"]]
        metrics[str(task)] = (by_role or list(group["metric"]))[0]
    return rows[rows["metric"] == rows["task"].map(metrics)]


def _lines(own: DataFrame, found: Streams, label: str, color: int) -> Iterator[Series]:
    """What a run retains at its checkpoints, and its scores right after each edit."""
    own = own.assign(number=own["stage"].map(int)).sort_values("number")
    stages, first = list(own["number"]), own.iloc[0]
    retained = [cell(own[own["number"] == stage]) for stage in stages]
    positions = [float(stage) for stage in stages]
    yield series_of(label, retained, positions=positions, color=color, style=RETAINED_DASH)
    name = f"{label}, right after each edit"
    place = ["run", "task", "metric", "filter", "file"]
    cases = found.cases[(found.cases[place] == first[place]).all(axis=1)]
    if not cases.empty and IMMEDIATE in set(cases["stage"]):
        cells = _immediate(cases, stages, is_share=bool(first["is_share"]))
        yield series_of(name, cells, positions=positions, color=color, style=IMMEDIATE_DASH)
        return
    place = [*place[:4], "stage"]
    row = found.rows[(found.rows[place] == [*first[place[:4]], IMMEDIATE]).all(axis=1)]
    if not row.empty:
        yield series_of(name, [cell(row)], positions=positions[-1:], color=color, style=IMMEDIATE_DASH)


def _immediate(cases: DataFrame, stages: Sequence[int], *, is_share: bool) -> list[Cell]:
    """The scores right after each edit, over the cases that are edited by each checkpoint."""
    known = read_case_scores(cases[cases["stage"] == IMMEDIATE])
    cells = []
    for stage in stages:
        at_stage = cases[(cases["stage"] == str(stage)) & cases["due"]]
        chosen = np.isin(known.documents, list(at_stage["doc_id"]))
        part = known.of_cases(chosen, known.num_seeds, known.edits_of(np.asarray(known.documents)[chosen].tolist()))
        value = float(part.of_sums(part.units().sum(axis=0))) if part.num_scored else float("nan")
        interval = estimate(Summary(value, is_share), part).interval
        ends = (min(interval.low, value), max(interval.high, value)) if interval else (float("nan"),) * 2
        cells.append(Cell(value, *ends, part.num_scored))
    return cells


def _drift(steps: DataFrame, labels: dict[str, str], looks: dict[str, int]) -> Iterator[Lines]:
    """A panel for each measure of drift that some stream has."""
    for measure, (title, unit) in DRIFTS.items():
        series = []
        for run, label in labels.items():
            own = steps[(steps["run"] == run) & steps[measure].notna()]
            if not own.empty:
                made = own["num_edits"].fillna(own["step"] + 1)
                series.append(
                    Series(name=label, values=list(own[measure]), positions=list(made), color=looks[label], style=0)
                )
        if series:
            yield Lines(
                title=title, series=series, position_label="number of edits", value_label=unit, whole_positions=True,
                log_positions=False,
            )  # fmt: skip


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="streams: retained and immediate scores over checkpoints, and the drift of the model",
    published="WILD figures 4 and 5, within one stream",
    needs=NEEDS,
    draw=lambda inputs, options: draw(Streams(inputs.rows(), inputs.cases(), inputs.steps()), options),
    options=("metric",),
)
