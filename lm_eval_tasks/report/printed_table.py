"""The table that lm-eval prints, with the scores of editing tasks only, and lines about what was left out.

Results have further columns for every metric, and summaries as JSON texts. They stay in the files. The table has
``<metric>_n`` where it differs from the number of cases, and JSON texts of numbers as rows of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from edit_hooks.utils.printable import printable
from lm_eval_tasks.common.scoring.columns import NOT_AVAILABLE, SUMMARIES, Column, read_columns
from lm_eval_tasks.common.scoring.metric_list import declared_metrics, exclusion_clause
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
    rows = {
        task: _shown_row(task, saved, results) if _counts_cases(configs.get(task, {}), saved) else saved
        for task, saved in results[column].items()
    }
    return {**results, column: rows}


def left_out_note(results: Mapping[str, Any]) -> str:
    """One line per task in which something was left out, and one per distinct set of edits."""
    configs = results.get("configs", {})
    lines, edits = [], dict[str, list[str]]()
    for task, saved in results["results"].items():
        if not _counts_cases(configs.get(task, {}), saved):
            continue
        if parts := dict.fromkeys(_left_out(task, saved, results)):
            lines.append(f"{task}: {'; '.join(parts)}.")
        for summary in dict.fromkeys(saved.get(f"edit,{pipeline}") for pipeline in _pipelines(saved)):
            edits.setdefault(_edit_summary(summary), []).append(task)
    lines += [f"Edits of {_some(tasks)}: {summary}." for summary, tasks in edits.items() if summary]
    return "".join(f"\n{printable(line)}" for line in lines)


def _counts_cases(config: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a task has columns that count its cases: editing tasks, and others with unscored documents."""
    return is_editing_task(config) or any(key.startswith("unscored_reason,") for key in saved)


def _shown_row(task: str, saved: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    num_cases = _num_cases(task, results)
    row = {key: value for key, value in saved.items() if "," not in key}
    for column in _columns(saved):
        suffix = f",{column.filter}"
        for name, value in _values(column):
            row[name + suffix] = value
        if column.name + suffix not in row:
            continue
        if (stderr := column.number("stderr")) is not None:
            row[f"{column.name}_stderr{suffix}"] = stderr
        if (n := column.number("n")) is not None and n != num_cases:
            row[f"{column.name}_n{suffix}"] = f"{n:g} of {num_cases}"
    return row


def _values(column: Column) -> Iterator[tuple[str, Any]]:
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
    counts = results.get("n-samples", {}).get(task) or {}
    if counts.get("original") != counts.get("effective"):
        yield f"{counts.get('effective')} of {counts.get('original')} cases asked (--limit or --samples)"
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
    columns = [column for column in _columns(saved) if column.filter == pipeline]
    declared = declared_metrics(results.get("configs", {}).get(task, {}))
    excluded: dict[tuple[str, float], list[str]] = {}
    for column in columns:
        if count := column.number("excluded"):
            reason = exclusion_clause(declared.get(column.metric, {}))
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
    rest = [f"{key} {_shown(value)}" for key, value in summary.items() if key not in ("edits", "failed")]
    return ", ".join([f"{summary['edits']} made, {summary['failed']} failed", *rest])


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _columns(saved: Mapping[str, Any]) -> list[Column]:
    columns = {key: value for key, value in saved.items() if "," in key}
    return [column for column in read_columns(columns) if column.metric not in SUMMARIES]


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
