"""Tasks of a finished run of which no case has a score, as where all edits were refused."""

from __future__ import annotations

from pathlib import Path

from edit_hooks.utils.errors import EditingError
from lm_edit.results.files.runs import ResultFile, read_result_files
from lm_edit.results.tables import result_rows

NO_REASON = "no reason is stated"


def tasks_without_scores(file: ResultFile) -> dict[str, str]:
    """Task -> the most frequent reason, of the tasks without any scored case.

    Counts of cases, and facts about the unedited model, are there without a usable edit; they do not count as scores.
    """
    reasons: dict[str, str] = {}
    scored: set[str] = set()
    for row in result_rows(file):
        task = str(row["task"])
        if row["higher_is_better"] is None and file.task_config(task).get("metric_list"):
            continue
        if row["value"] is not None:
            scored.add(task)
        else:
            counts = row["unscored_reason"]
            reasons.setdefault(task, max(counts, key=counts.__getitem__) if counts else NO_REASON)
    return {task: reason for task, reason in reasons.items() if task not in scored}


def missing_scores(results: Path) -> tuple[bool, str]:
    """Whether a run's folder of results has no score at all, and a sentence about the tasks without one; "" if none."""
    try:
        file = read_result_files(results)[-1]
        without = tasks_without_scores(file)
    except EditingError as error:
        return False, str(error)
    if not without:
        return False, ""
    by_reason: dict[str, list[str]] = {}
    for task, reason in without.items():
        by_reason.setdefault(reason, []).append(task)
    parts = [f"no case of {', '.join(tasks)} has a score ({reason})" for reason, tasks in by_reason.items()]
    return len(without) == len(file.tasks), "; ".join(parts)
