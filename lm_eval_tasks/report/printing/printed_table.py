"""The table that lm-eval prints, with the scores of editing tasks only, and lines about what was left out.

Results have further columns for every metric, and summaries as JSON texts. They stay in the files. The table has
``<metric>_n`` where it differs from the number of cases, and JSON texts of numbers as rows of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.edit_report import WRECKED
from edit_hooks.utils.printable import printable
from lm_eval_tasks.common.scoring.columns import NOT_AVAILABLE, MetricColumn
from lm_eval_tasks.common.scoring.metric_list import declared_metrics, exclusion_clause
from lm_eval_tasks.report.printing.printed_columns import (
    ALL,
    VARIABLE,
    PlacedName,
    columns_of,
    in_order,
    num_left_out,
    printed_columns,
)
from lm_eval_tasks.report.run_facts import is_editing_task

MAX_REASONS = 3
MAX_NAMES = 2
MAX_REASON_CHARACTERS = 300


def shown_results(results: Mapping[str, Any], column: str) -> dict[str, Any]:
    """The results with the columns to print; tasks that count no cases are unchanged.

    Args:
        results: what lm-eval's ``make_table`` gets.
        column: the part of them that it prints, ``results`` or ``groups``.
    """
    configs = results.get("configs", {})
    chosen = printed_columns(results) if column == "results" else {}
    rows, directions = {}, dict(results.get("higher_is_better", {}))
    for task, saved in results[column].items():
        if not _counts_cases(configs.get(task, {}), saved):
            rows[task] = saved
            continue
        columns = [one.column for one in chosen[task]] if task in chosen else columns_of(saved)
        shown, labels = _shown_row(task, saved, results, columns)
        rows[task] = _in_this_order(shown) if task in chosen else shown
        own = directions.get(task, {})
        directions[task] = {**own, **{label: own.get(name) for label, name in labels.items()}}
    rows = {name: rows[name] for name in in_order(list(rows), chosen)}
    children = {group: list(in_order(members, chosen)) for group, members in results.get("group_subtasks", {}).items()}
    return {**results, column: rows, "higher_is_better": directions, "group_subtasks": children}


def _in_this_order(row: Mapping[str, Any]) -> dict[str, Any]:
    return {PlacedName.of(key, number): value for number, (key, value) in enumerate(row.items())}


def left_out_note(results: Mapping[str, Any]) -> str:
    """One line per task in which something was left out, and one per distinct set of edits."""
    configs = results.get("configs", {})
    found, edits = dict[str, list[str]](), dict[str, list[str]]()
    for task, saved in results["results"].items():
        if not _counts_cases(configs.get(task, {}), saved):
            continue
        if parts := dict.fromkeys(_left_out(task, saved, results)):
            found.setdefault("; ".join(parts), []).append(task)
        for summary in dict.fromkeys(saved.get(f"edit,{pipeline}") for pipeline in _pipelines(saved)):
            edits.setdefault(_edit_summary(summary), []).append(task)
    lines = list(_left_out_columns(results))
    if asked := _asked(results):
        lines.append(asked)
    lines += [f"{_some(tasks)}: {parts}." for parts, tasks in found.items()]
    lines += [f"Edits of {_some(tasks)}: {summary}." for summary, tasks in edits.items() if summary]
    return "".join(f"\n{printable(line)}" for line in lines)


def _left_out_columns(results: Mapping[str, Any]) -> Iterator[str]:
    if number := num_left_out(results, printed_columns(results)):
        yield f"{number} further columns: --output_path DIR saves all of them, {VARIABLE}={ALL} prints them."


def _asked(results: Mapping[str, Any]) -> str:
    """How many cases of each task were asked, once for tasks with the same numbers."""
    tasks: dict[tuple[Any, Any], list[str]] = {}
    for task, saved in results["results"].items():
        counts = results.get("n-samples", {}).get(task) or {}
        numbers = counts.get("effective"), counts.get("original")
        if _counts_cases(results.get("configs", {}).get(task, {}), saved) and numbers[0] != numbers[1]:
            tasks.setdefault(numbers, []).append(task)
    parts = [f"{asked} of {original} cases of {_some(names)}" for (asked, original), names in tasks.items()]
    return f"Asked (--limit or --samples): {', '.join(parts)}." if parts else ""


def _counts_cases(config: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a task has columns that count its cases: editing tasks, and others with unscored documents."""
    return is_editing_task(config) or any(key.startswith("unscored_reason,") for key in saved)


def _shown_row(
    task: str, saved: Mapping[str, Any], results: Mapping[str, Any], columns: Sequence[MetricColumn]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The row of a task, and label -> column of those that name their number of cases."""
    num_cases = _num_cases(task, results)
    row = {key: value for key, value in saved.items() if "," not in key}
    labels = {}
    for column in columns:
        suffix = f",{column.filter}"
        values = dict(_values(column))
        if column.name in values and (n := column.number("n")) is not None and n != num_cases:
            label = f"{column.name} ({n:g} of {num_cases})"
            labels[label] = column.name
            values = {label if name == column.name else name: value for name, value in values.items()}
        row |= {name + suffix: value for name, value in values.items()}
        if (stderr := column.number("stderr")) is not None:
            row |= {f"{name}_stderr{suffix}": stderr for name in values if name.startswith(column.name)}
    return row, labels


def _values(column: MetricColumn) -> Iterator[tuple[str, Any]]:
    """Rows of a column: itself, or the numbers of its JSON text."""
    summary = _json_object(column.value)
    if "matrix" in summary:
        names = {"diagonal_mean": "right after each step", "last_row_mean": "after the last step"}
        yield from ((f"{column.name} ({words})", summary[key]) for key, words in names.items())
    elif summary:
        for group, cell in summary.items():
            value = cell.get("value") if isinstance(cell, Mapping) else cell
            yield f"{column.name} {printable(str(group), MAX_REASON_CHARACTERS)}", value
    elif not isinstance(column.value, str) or column.value == NOT_AVAILABLE:
        yield column.name, column.value


def _left_out(task: str, saved: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    """Clauses about a task."""
    for pipeline in _pipelines(saved):
        yield from _left_out_by(pipeline, task, saved, results)


def _left_out_by(pipeline: str, task: str, saved: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    """Clauses about one filter pipeline of a task."""
    num_cases = _num_cases(task, results)
    reasons = _json_object(saved.get(f"unscored_reason,{pipeline}"))
    if unscored := saved.get(f"unscored,{pipeline}"):
        named = [
            f"{printable(reason, MAX_REASON_CHARACTERS).rstrip('.')} ({count})" for reason, count in reasons.items()
        ]
        more = f"; {len(named) - MAX_REASONS} further reasons" if len(named) > MAX_REASONS else ""
        judged = " by the judge" if pipeline == "judge" else ""
        yield f"{unscored} of {num_cases} cases unscored{judged}: {', '.join(named[:MAX_REASONS])}{more}"
    columns = [column for column in columns_of(saved) if column.filter == pipeline]
    declared = declared_metrics(results.get("configs", {}).get(task, {}))
    excluded: dict[tuple[str, float], list[str]] = {}
    for column in columns:
        if count := column.number("excluded"):
            metric = declared.get(column.metric, {})
            if metric.get("filtered") == "not_asked":
                continue  # the row of the column has the number of its cases
            reason = exclusion_clause(metric)
            excluded.setdefault((reason, count), []).append(column.name)
    for (reason, count), names in excluded.items():
        yield f"{count:g} of {num_cases} cases {reason.format(columns=_some(names))}"
    zeros = [
        f"{column.name} {column.number('or_0'):.4f}"
        for column in columns
        if column.number("failed") and column.number("or_0") is not None and column.number("or_0") != column.value
    ]
    if zeros:
        yield f"with failed cases as 0: {_some(zeros)}"


def _edit_summary(saved: object) -> str:
    """The summary of a task's edits in words; "" without edits."""
    summary = _json_object(saved)
    if not summary:
        return ""
    counts = ["edits", "failed", WRECKED]
    rest = [f"{key} {_shown(value)}" for key, value in summary.items() if key not in counts]
    wrecked = [f"{summary[WRECKED]} wrecked"] if WRECKED in summary else []
    return ", ".join([f"{summary['edits']} made, {summary['failed']} failed", *wrecked, *rest])


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _pipelines(saved: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.partition(",")[2] for key in saved if "," in key))


def _num_cases(task: str, results: Mapping[str, Any]) -> int | None:
    return (results.get("n-samples", {}).get(task) or {}).get("effective")


def _json_object(value: object) -> dict[str, Any]:
    """A summary, which results hold as a JSON text; empty for anything else."""
    content = json.loads(value) if isinstance(value, str) and value.startswith("{") else None
    return content if isinstance(content, dict) else {}


def _some(names: list[str]) -> str:
    """The first names, and the number of the others."""
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest
