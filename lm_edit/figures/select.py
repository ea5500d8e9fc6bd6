"""The rows of results that a figure draws, checked to be comparable.

Rows are those of :func:`lm_edit.load_results`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from edit_hooks.utils.errors import EditingError
from lm_edit.figures.drawing.charts import Reference, Series
from lm_edit.figures.needs import Needs, Options
from lm_edit.results.comparing import (
    MODEL,
    SAME_CASES,
    SAME_SCORE,
    SETTINGS,
    differences,
    has_context,
    name_of,
    run_labels,
)
from lm_edit.results.filters import SAMPLE_FILE, is_missing, rows_at, text_of
from lm_edit.results.statistics.of_rows import describe_intervals, interval_of
from lm_eval_tasks.common.scoring.columns import same_up_to_last_digits

if TYPE_CHECKING:
    from pandas import DataFrame

    from lm_edit.results.answers.documents import CaseDocument

UNEDITED = "unedited"
FINAL = ""
# What must be the same in all rows of a task's column. A run's own settings are named in the labels instead.
CONDITIONS = (*SAME_SCORE, "filter", *SAME_CASES)
OF_SCORES = ("population", "judge", "filter")  # conditions of scores that figures of answers do not show
OF_CASE_SETS = tuple(SAME_CASES)  # conditions that do not matter to figures of one case
# Columns that distinguish runs of one editor.
DIFFERENCES = tuple(column for column in SETTINGS if column != "editor")
# Columns in which the runs of a line agree; it shows what the number of edits changes.
OF_A_LINE = tuple(column for column in DIFFERENCES if column != "num_edits")
LOG_RANGE = 20  # positions with a larger ratio are drawn on a logarithmic axis


class Cell(NamedTuple):
    """A value with its 95% interval (NaN without one) and its number of cases; ``gap`` is shown where it is NaN."""

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int | None = None
    gap: str = "unscored"


MISSING = Cell(math.nan, gap="not run")


def require_rows(
    rows: DataFrame, needs: Needs, metrics: Sequence[str], *, tasks: Sequence[str] = (), stage: str = FINAL
) -> DataFrame:
    """The rows of these columns and tasks at a stage.

    Raises:
        EditingError: if some column is in no row; if rows of one column differ in protocol, data, version, population,
            judge, filter or set of cases (``--limit``, ``--samples``).
    """
    at_stage = rows[rows["stage"] == stage]
    if tasks:
        at_stage = at_stage[at_stage["task"].isin(tasks)]
    chosen = at_stage[at_stage["metric"].isin(metrics)]
    found = set(chosen["metric"])
    absent = [metric for metric in metrics if metric not in found]
    if absent:
        where = f" of {', '.join(tasks)}" if tasks else ""
        raise needs.missing(f"no run has the column {', '.join(absent)}{where}")
    require_comparable(chosen, needs)
    return chosen


def require_comparable(rows: DataFrame, needs: Needs, varying: Sequence[str] = ()) -> None:
    """Raise EditingError if rows of one column of a task differ in their conditions.

    Args:
        varying: conditions that the figure compares.
    """
    for differing in differences(rows, ("task", "metric"), [name for name in CONDITIONS if name not in varying]):
        task, metric = differing.place
        values = sorted({value for _, value in differing.values})
        example = next(filter(None, values))
        raise EditingError(
            f"{needs.figure}: the runs differ in {differing.condition} of {metric} ({task}): "
            f"{', '.join(value or 'none' for value in values)}. "
            f"Choose with --only {shlex.quote(f'{differing.condition}={example}')} or give comparable files."
        )
    for model, group in rows.groupby("model"):
        for column in ("model_hash", "model_parts"):
            if len(found := set(group[column])) > 1:
                raise EditingError(
                    f"{needs.figure}: {len(found)} models with different {MODEL[column]} are named {model}. "
                    f"Choose with --only {shlex.quote(f'{column}={max(map(str, found))}')}."
                )


def require_comparable_documents(
    documents: Sequence[CaseDocument], results: DataFrame, needs: Needs, varying: Sequence[str] = ()
) -> None:
    """Raise EditingError if the results of the drawn documents differ in the conditions of their answers.

    Args:
        results: of all runs. varying: as of :func:`require_comparable`.
    """
    places = {(document.file, document.task) for document in documents}
    own = rows_at(results[results["stage"] == FINAL], SAMPLE_FILE, places)
    for _, of_filter in own.groupby("filter"):  # the protocol of a judged pipeline has more than that of the answers
        require_comparable(of_filter, needs, varying=(*OF_SCORES, *varying))


def first_metric(rows: DataFrame, needs: Needs, options: Options, alternatives: Sequence[str]) -> tuple[str, list[str]]:
    """The chosen column, or the first alternative that some row has; and sentences about the choice for the caption."""
    present = set(rows[rows["stage"] == FINAL]["metric"])
    if options.metric:
        if options.metric not in present:
            raise needs.missing(f"no run has the column {options.metric}")
        return options.metric, []
    for metric in alternatives:
        if metric in present:
            passed = alternatives[: alternatives.index(metric)]
            return metric, [f"Drawn: {metric}; the files have no {', '.join(passed)}."] if passed else []
    raise needs.missing(f"no run has a column {' or '.join(alternatives)}")


def edited(rows: DataFrame) -> DataFrame:
    """The rows of edited models."""
    return rows[rows["editor"] != UNEDITED]


def require_edited(rows: DataFrame, needs: Needs) -> DataFrame:
    """The rows of edited models; raises EditingError without any."""
    if edited(rows).empty:
        raise needs.missing("all runs are of the unedited model")
    return edited(rows)


def with_names(rows: DataFrame) -> DataFrame:
    """The rows with a column ``name``: the name of the editor, as figures show it."""
    return rows.assign(name=[name_of(row) for row in rows.to_dict("records")])


def edited_labels(rows: DataFrame) -> dict[str, str]:
    """Run -> label of the edited models, sorted by label; see :func:`lm_edit.results.comparing.run_labels`."""
    return dict(sorted(run_labels(edited(rows)).items(), key=lambda item: item[1]))


def with_unedited(drawn: DataFrame, rows: DataFrame) -> DataFrame:
    """The drawn rows of edited models, and those of the unedited model on their models and tasks; for the caption."""
    places = set(zip(drawn["model"], drawn["task"], strict=True))
    on_places = [place in places for place in zip(rows["model"], rows["task"], strict=True)]
    own = rows[on_places]
    return rows.loc[drawn.index.union(own[own["editor"] == UNEDITED].index)]


def not_drawn(rows: DataFrame, drawn: DataFrame, why: str) -> list[str]:
    """A sentence for the caption that names the edited runs that are not drawn, or their editor if none of its is."""
    left = {run: label for run, label in edited_labels(rows).items() if run not in set(drawn["run"])}
    names = {str(row["run"]): name_of(row) for row in rows.to_dict("records")}
    of_drawn = {names[str(run)] for run in drawn["run"]}
    texts = [label if names[run] in of_drawn else names[run] for run, label in left.items()]
    return [f"Not drawn, {why}: {', '.join(dict.fromkeys(texts))}."] if texts else []


def source_of_edits(edits: object) -> str:
    """The benchmark or file of a run's edits and its data, without the digest of those that were made."""
    return re.sub(r" ?\b[0-9a-f]{12}\)$", ")", text_of(edits)).removesuffix(" ()")


def require_one_line(line: DataFrame, needs: Needs, name: str, varying: Sequence[str] = ()) -> None:
    """Raise EditingError if the runs of a line differ in more than the number of edits, and in ``varying``."""
    for column in OF_A_LINE:
        values = sorted(set(line[column].map(source_of_edits if column == "edits" else text_of)))
        if column not in varying and len(values) > 1:
            raise needs.missing(
                f"the runs of {name} differ in {column} ({', '.join(values)}), so a line over the number of edits "
                f"would show both; {choice_between(line.drop_duplicates(column))}"
            )


def choice_between(rows: DataFrame) -> str:
    """Advice on how to choose one of several runs: a column in which they differ, each with a value that one has."""
    found = []
    for column in DIFFERENCES:
        values = set(rows[column].map(text_of))
        known = sorted(values - {""})
        if len(values) > 1 and known:
            found.append("--only " + shlex.quote(f"{column}={known[0]}"))
    return "choose with " + (" or ".join(found) or f"--only run={rows.iloc[0]['run']}")


def without_context(editor: str, icl: object) -> str:
    """The editor to which a run added a context; with one, it is called ``<editor>+<context>``."""
    return editor.rpartition("+")[0] or editor if has_context(icl) else editor


def cell(rows: DataFrame, *, whiskers: bool = True) -> Cell:
    """The one row as a cell; without a row, a missing value.

    Args:
        whiskers: with the interval, for which samples are read.

    Raises:
        EditingError: for several rows, which the figure cannot draw as one value.
    """
    if len(rows) > 1:
        first = rows.iloc[0]
        raise EditingError(
            f"{len(rows)} rows have the column {first['metric']} of run {first['run']}: tasks "
            f"{', '.join(sorted(set(rows['task'])))}. Choose with --only {shlex.quote('task=' + first['task'])}."
        )
    if rows.empty:
        return MISSING
    row = rows.iloc[0]
    interval = interval_of(row.to_dict()).interval if whiskers else None
    value = float(row["value"])
    # The bootstrap's interval of a skewed score may leave out its value, and whiskers have no negative length.
    ends = (math.nan, math.nan) if interval is None else (min(interval.low, value), max(interval.high, value))
    return Cell(value, *ends, None if is_missing(row["n"]) else int(row["n"]))


def run_cells(rows: DataFrame, runs: Sequence[str], metric: str, *, whiskers: bool = True) -> list[Cell]:
    """A cell for each run."""
    of_metric = rows[rows["metric"] == metric]
    return [cell(of_metric[of_metric["run"] == run], whiskers=whiskers) for run in runs]


def series_of(
    name: str, cells: Sequence[Cell], *, positions: Sequence[float] = (), color: int = 0, style: int = 0
) -> Series:
    """Values with intervals (where any has one) and counts."""
    with_intervals = any(not math.isnan(entry.low) for entry in cells)
    return Series(
        name=name,
        values=[entry.value for entry in cells],
        low=[entry.low for entry in cells] if with_intervals else (),
        high=[entry.high for entry in cells] if with_intervals else (),
        counts=[entry.n for entry in cells],
        gaps=[entry.gap for entry in cells],
        positions=positions,
        color=color,
        style=style,
    )


def unedited_reference(rows: DataFrame, metric: str, name: str = UNEDITED, color: int | None = None) -> list[Reference]:
    """The value of the unedited model as a reference line; none without a run of it or without a value.

    Beside edited models only those runs of it count that answer under the same options as one of these.
    """
    own = rows[(rows["editor"] == UNEDITED) & (rows["metric"] == metric)]
    if not edited(rows).empty:
        own = own[own["answer_options"].map(text_of).isin(set(edited(rows)["answer_options"].map(text_of)))]
    values = distinct_values(own)
    if len(values) > 1:
        raise EditingError(
            f"{len(values)} runs of the unedited model have different values of {metric} ({values[0]:.6g} to "
            f"{values[-1]:.6g}): runs {', '.join(sorted(set(own['run'])))}. Give the files of one of them."
        )
    return [Reference(name=name, value=values[0], color=color)] if values else []


def distinct_values(rows: DataFrame) -> list[float]:
    """The values of rows in order; of those that are the same but for last digits, the lowest."""
    found: list[float] = []
    for value in sorted(rows["value"].dropna().map(float)):
        if not found or not same_up_to_last_digits(found[-1], value):
            found.append(value)
    return found


class ModelRuns(NamedTuple):
    """A model, its rows, and run -> label of its edited runs."""

    model: str
    rows: DataFrame
    labels: dict[str, str]


def by_model(rows: DataFrame) -> list[ModelRuns]:
    """The models with an edited run, sorted by name."""
    models = [ModelRuns(str(model), group, edited_labels(group)) for model, group in rows.groupby("model")]
    return [model for model in models if model.labels]


def run_looks(rows: DataFrame, models: Sequence[ModelRuns]) -> dict[str, int]:
    """Label -> number of its color and marker.

    Where each editor is drawn once, the numbers count the editors of all rows, so that an editor has one look in all
    figures of the same files. Otherwise they count the labels.

    Args:
        rows: all rows that the figure is given. models: the drawn ones.
    """
    editors = sorted({name_of(row) for row in edited(rows).to_dict("records")})
    labels = sorted({label for model in models for label in model.labels.values()})
    names = editors if set(labels) <= set(editors) else labels
    return {label: names.index(label) for label in labels}


def value_label(rows: DataFrame, metric: str, name: str | None = None) -> str:
    """Label of an axis: the name of a column, and which direction is better where the task declares one."""
    declared = set(rows[rows["metric"] == metric]["higher_is_better"].dropna().map(bool))
    if len(declared) != 1:
        return name or metric
    return f"{name or metric} ({'higher' if declared.pop() else 'lower'} is better)"


def log_scale(positions: Sequence[float]) -> bool:
    """Whether positions spread so widely that the labels of a linear axis would cover each other."""
    return min(positions) > 0 and max(positions) / min(positions) > LOG_RANGE


def caption(rows: DataFrame, *, unedited: bool = True, whiskers: bool = True, notes: Sequence[str] = ()) -> list[str]:
    """Sentences about the drawn rows: cases, data, protocol, and if wanted intervals and reference line."""
    own = edited(rows) if not edited(rows).empty else rows
    sentences = [
        f"{_counts(own)} Data: {_join(own['data'])}; model: {_join(own['model'])}; mode: {_join(own['mode'])}."
    ]
    protocols = [text_of(text) for text in own["protocol"].unique() if text_of(text)]
    columns = ", ".join(dict.fromkeys(own["metric"]))
    sentences.append(f"Columns: {columns}{f' (settings of the task: {_join(protocols)})' if protocols else ''}.")
    if whiskers:
        sentences.append(_whiskers(own))
    if unedited and (rows["editor"] != UNEDITED).all():
        sentences.append("No run of the unedited model (mode=none) is among the files.")
    return [" ".join(sentences), *notes]


def _whiskers(rows: DataFrame) -> str:
    """What the whiskers of these rows are, and which have none."""
    estimates = [interval_of(row) for row in rows.to_dict("records")]
    if text := describe_intervals(estimates):
        return f"Whiskers: {text}."
    return f"No whiskers: {' or '.join(sorted({found.note for found in estimates}))}."


def _counts(rows: DataFrame) -> str:
    known = rows["n"].dropna()
    if known.empty:
        return "n is not in the files."
    low, high = int(known.min()), int(known.max())
    counts = f"n = {low}" if low == high else f"n = {low} to {high}"
    # Not the column "unscored", which counts the cases of a task in which any metric is missing.
    left_out = [
        f"{word} {int(rows[name].dropna().max())}"
        for name, word in {"excluded": "excluded", "failed": "unscored"}.items()
        if not rows[name].dropna().empty and rows[name].dropna().max() > 0
    ]
    return f"{counts} cases" + (f" (at most: {', '.join(left_out)})." if left_out else ".")


def _join(values: Sequence[object]) -> str:
    return ", ".join(sorted(set(map(text_of, values))))
