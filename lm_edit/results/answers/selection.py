"""Records that several unedited models all answer wrongly, as in the selection for sequential editing in QAEdit.

The paper (section 7.1) edits 1,000 rows that all of its unedited models answer incorrectly under WILD. Here the scores
of saved runs decide. A record without a score in some run is neither right nor wrong: it ends the selection, or is left
out and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses
from lm_edit.results.files.runs import Paths, ResultFile, read_result_files
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.tables import case_rows
from lm_eval_tasks.common.records.benchmark import benchmark_of_task
from lm_eval_tasks.common.records.dataset import read_raw
from lm_eval_tasks.report.run_facts import UNEDITED

DEFAULT_TASK = "qaedit_wild_reliability"
METRICS = {"em": "efficacy_wild_em", "judge": "efficacy_wild_judge"}
PROVENANCE = "provenance"
NO_ANSWER = "not asked"

_CHAT_TEMPLATE = re.compile(r"chat template [0-9a-f]+")  # every model has its own


@dataclass(frozen=True)
class ModelScores:
    """The scores of one unedited model.

    Attributes:
        run: identity of the run. name: readable. model: hub id or folder. weights: hash, "" if unknown.
        values: score of each record by its row; ``None`` if unscored.
        reasons: reason by row, of the unscored ones.
    """

    run: str
    name: str
    model: str
    weights: str
    values: Mapping[int, float | None]
    reasons: Mapping[int, str]

    def missing(self, num_records: int) -> dict[int, str]:
        """Reason by row of the records without a score."""
        return {
            row: self.reasons.get(row) or "unscored" if row in self.values else NO_ANSWER
            for row in range(num_records)
            if self.values.get(row) is None
        }


@dataclass(frozen=True)
class RecordSelection:
    """The chosen records, and counts.

    Attributes:
        records: in the order of the file, with their ``provenance``.
        num_records: of the file.
        scores: of each run.
        left_out: reason -> number of records without a score in some run.
    """

    records: list[dict[str, Any]]
    num_records: int
    scores: Sequence[ModelScores]
    left_out: Counter[str] = field(default_factory=Counter)


def select_wrong(
    paths: Paths, data: str, *, task: str = DEFAULT_TASK, by: str = "em", skip_unscored: bool = False
) -> RecordSelection:
    """Select the records whose edit question every run answers wrongly.

    Args:
        paths: result files of unedited models, with samples, or folders that contain some.
        data: the records that they were asked, as the setting ``data`` of the tasks.
        task: a task of WILD reliability.
        by: one of :data:`METRICS`.
        skip_unscored: leave records that were asked and have no score in some run out, instead of an error.

    Raises:
        EditingError: for runs of an edited model, runs that were asked differently or of other data, records that a run
            was not asked, and those without a score.
    """
    metric = METRICS[by]
    read = read_result_files(paths)
    files = [file for file in read if task in file.tasks and file.num_cases(task) is not None]
    if not files:
        known = dict.fromkeys(name for file in read for name in file.tasks)
        raise EditingError(f"no run has the task {task!r}.{near_misses(task, known)} There are: {', '.join(known)}.")
    benchmark = benchmark_of_task(task)
    raw = read_raw(benchmark.source, {"data": data})
    scores: list[ModelScores] = []
    for file in files:
        _check_run(file, task, raw.origin["sha256"], len(raw.rows), data)
        scores.append(_read_scores(file, task, metric))
    _check_comparable([TaskFacts(file, task) for file in files], by)
    if repeated := [name for name, count in Counter(one.run for one in scores).items() if count > 1]:
        twice = ", ".join(str(file.path) for file in files if file.facts.run == repeated[0])
        raise EditingError(f"two results are of the same run: {twice}. Give one of them.")
    left_out = _without_score(scores, len(raw.rows), skip_unscored)
    selection = RecordSelection([], len(raw.rows), scores, Counter(left_out.values()))
    origin = {
        "builder": "lm-edit results select-wrong",
        "task": task,
        "metric": metric,
        "judge": TaskFacts(files[0], task).judge if by == "judge" else "",
        "data_sha256": raw.origin["sha256"],
        "models": [{"model": one.model, "weights": one.weights, "run": one.run} for one in scores],
    }
    for row, (where, record) in enumerate(raw.rows):
        if row in left_out or any(one.values[row] for one in scores):
            continue
        selection.records.append(
            _with_origin(record, origin, where) if PROVENANCE in benchmark.source.notes else record
        )
    return selection


def _check_run(file: ResultFile, task: str, sha256: str, num_records: int, data: str) -> None:
    """Refuse a run of an edited model, and one of other records."""
    facts, source = file.facts, TaskFacts(file, task).source
    is_stock = "edited_hf" not in file.content["config"]
    if not is_stock and (facts.editor != UNEDITED or facts.mode != "none" or facts.icl != "no"):
        raise EditingError(
            f"{file.path} is a run of an edited model ({facts.name}); the selection is about unedited ones (mode=none)."
        )
    if source.get("sha256") != sha256:
        raise EditingError(f"{file.path} was asked other records than those of data={data}: their SHA-256 differs.")
    if "subset_seed" in source or source.get("records") != num_records:
        raise EditingError(
            f"{file.path} was asked {source.get('records')} of the {num_records} records, or in another order; run it "
            "without subset, and with records that are all usable."
        )


def _check_comparable(tasks: Sequence[TaskFacts], by: str) -> None:
    """Refuse runs whose answers were asked for, or judged, in different ways."""

    def identity(about: TaskFacts) -> dict[str, str]:
        protocol = _CHAT_TEMPLATE.sub("chat template", about.protocol)
        judge = {"judge": about.judge} if by == "judge" else {}
        return {"version of the task": str(about.columns["task_version"]), "protocol": protocol, **judge}

    first = identity(tasks[0])
    for about in tasks[1:]:
        for name, value in identity(about).items():
            if value != first[name]:
                raise EditingError(
                    f"{tasks[0].file.path} and {about.file.path} differ in the {name}: {first[name]!r} and {value!r}. "
                    "Run them alike."
                )


def _read_scores(file: ResultFile, task: str, metric: str) -> ModelScores:
    values: dict[int, float | None] = {}
    reasons: dict[int, str] = {}
    known: dict[str, None] = {}
    for row in case_rows(file, task):
        known[row["metric"]] = None
        if row["metric"] != metric or row["stage"]:
            continue
        value, number = row["value"], row["doc_id"]
        if value not in (None, 0.0, 1.0):
            raise EditingError(
                f"{file.path}: {metric} of document {number} is {value}, neither right (1) nor wrong (0)."
            )
        values[number], reasons[number] = value, row["reason"]
    if not values:
        hint = " Run it with a judge (--metadata judge=...)." if metric == METRICS["judge"] else ""
        raise EditingError(f"{file.path}: {task} has no column {metric}.{hint} There are: {', '.join(known)}.")
    facts = file.facts
    return ModelScores(facts.run, facts.name, facts.model, facts.model_hash, values, reasons)


def _without_score(scores: Sequence[ModelScores], num_records: int, skip_unscored: bool) -> dict[int, str]:
    """Reason by row of the records without a score in some run.

    Raises:
        EditingError: if there are some, unless they were asked and are to be skipped.
    """
    found: dict[int, str] = {}
    for one in scores:
        missing = one.missing(num_records)
        counts = Counter(missing.values())
        if counts[NO_ANSWER] or (counts and not skip_unscored):
            listed = ", ".join(f"{reason} ({count})" for reason, count in counts.most_common())
            remedy = "run it again, or leave them out (--skip-unscored)"
            raise EditingError(
                f"run {one.name} has no score for {counts.total()} of {num_records} records: {listed}. A missing "
                f"answer is not a wrong one: {'run it without --limit' if counts[NO_ANSWER] else remedy}."
            )
        found |= missing
    return found


def _with_origin(record: Any, origin: Mapping[str, Any], where: str) -> dict[str, Any]:
    before = record.get(PROVENANCE) or {}
    if not isinstance(before, Mapping):
        raise EditingError(f"{where}: field 'provenance' is no object; drop it.")
    return {**record, PROVENANCE: {**before, "selection": origin}}
