"""Whether a task that was built again is the one that a run had: version, settings, documents and scores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.utils import handle_non_serializable, hash_string

from edit_hooks.utils.printable import printable
from lm_edit.judged_results.replay import SavedTask, another_task, as_json, build_task, plain_pipelines, with_answers
from lm_eval_tasks.common.scoring.columns import COMPANIONS, SEPARATOR, SUMMARIES
from lm_eval_tasks.common.scoring.metric_list import declared_metrics
from lm_eval_tasks.common.scoring.population import WRONG_JUDGE
from lm_eval_tasks.common.task.judge_filter import PIPELINE
from lm_eval_tasks.common.task.stages import filter_all_stages
from lm_eval_tasks.common.task.task import EditingTask

TOLERANCE = 1e-9  # relative and absolute: mathematical functions of two machines differ in last digits
JUDGE_STEPS = ("model_judge", "helper_judge")
# White space between the header of a chat template and an answer, where no saved continuation shows it.
SEPARATORS = ("", " ", "\n", "\n\n")


def same_task(saved: SavedTask, judge: object, known: Mapping[str, Path]) -> EditingTask:
    """Build the task of a run with a judge, and check that it is the one that the run had.

    Raises:
        EditingError: as :func:`~lm_edit.judged_results.replay.build_task`; and for another version, other metrics,
            filters or settings, documents that are not those that the run asked, and scores that its answers do not
            have here.
    """
    task = build_task(saved, judge, known, saved.separator)
    _check_config(task, saved)
    changed = _changed_document(instances := with_answers(task, saved), saved)
    for separator in SEPARATORS if saved.separator is None and changed is not None else ():
        task = build_task(saved, judge, known, separator)
        if (changed := _changed_document(instances := with_answers(task, saved), saved)) is None:
            break
    if changed is not None:
        raise another_task(
            saved.file, saved.name, f"document {changed} of the samples has another hash here than in the run"
        )
    for place, was, now in _other_scores(task, instances, saved):
        raise another_task(saved.file, saved.name, f"{place} was {was} in the run, and the same answer has {now} here")
    return task


def _check_config(task: EditingTask, saved: SavedTask) -> None:
    """Compare version, metrics, filters and settings with those of the run."""
    config, version = saved.saved_config, saved.file.content["versions"].get(saved.name)
    if str(version) != str(task.VERSION):
        raise another_task(saved.file, saved.name, f"its version was {version}, and is {task.VERSION}")
    now = as_json(task.dump_config(), _none_for_callables)
    compared = {"metrics": declared_metrics, "filters": _filters, "settings": lambda of: of.get("settings") or {}}
    for what, one in compared.items():
        before, after = one(config), one(now)
        for name in {**before, **after}:
            if not _agree(before.get(name), after.get(name)):
                was, has = (printable(json.dumps(found.get(name, "absent"))) for found in (before, after))
                raise another_task(saved.file, saved.name, f"of its {what}, {name} was {was}, and is {has}")


def _none_for_callables(value: Any) -> Any:
    """Functions of a YAML file have another text in every process; see `_agree`."""
    return None if callable(value) else handle_non_serializable(value)


def _filters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Pipeline -> its steps but those of the chosen judge."""
    pipelines = {one["name"]: one["filter"] for one in config.get("filter_list") or ()}
    steps = {
        name: [step for step in listed if step["function"] not in JUDGE_STEPS] for name, listed in pipelines.items()
    }
    if any(step["function"] in JUDGE_STEPS for step in pipelines.get(PIPELINE, ())):
        del steps[PIPELINE]
    return steps


def _changed_document(instances: Sequence[Instance], saved: SavedTask) -> int | None:
    """The first document whose hash is not that of the run; ``None`` if all are."""
    first_of = {instance.doc_id: instance for instance in reversed(instances)}
    for place, (number, row) in enumerate(saved.firsts.items()):
        text = json.dumps(first_of[place].doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
        if hash_string(text) != row.get("doc_hash"):
            return number
    return None


def _other_scores(task: EditingTask, instances: Sequence[Instance], saved: SavedTask) -> Iterator[tuple[str, Any, Any]]:
    """Scores without a judge that the saved answers do not have in this task: place, then, now.

    Of a run whose judge selects cases, columns over that population are left out: another judge may select others.
    """
    pipelines = list(plain_pipelines(task))
    filter_all_stages(instances, pipelines, task.stages)
    by_place: dict[int, list[Any]] = {}
    for instance in instances:
        by_place.setdefault(instance.doc_id, []).append(instance)
    rows = {(row["doc_id"], row.get("filter")): row for row in saved.rows}
    selected = [metric["metric"] for metric in task.config.metric_list if metric.get("population") == WRONG_JUDGE]
    for place, (number, first) in enumerate(saved.firsts.items()):
        for pipeline in pipelines:
            where = f"of document {number}, filter {pipeline.name}"
            answers = [instance.filtered_resps[pipeline.name] for instance in by_place[place]]
            scores = as_json(task.process_results(first["doc"], answers))
            row = rows.get((number, pipeline.name), {})
            columns = {*(row.get("metrics") or ()), *scores} - {*SUMMARIES}
            for name in sorted(columns):
                if not _is_of(name, selected) and not _agree(row.get(name, "absent"), scores.get(name, "absent")):
                    yield f"{name} {where},", row.get(name, "absent"), scores.get(name, "absent")


def _is_of(column: str, metrics: Sequence[str]) -> bool:
    """Whether a column is one of some metrics, a stage, a companion or a breakdown of one."""
    endings = {"", *(f"_{ending}" for ending in COMPANIONS)}
    rests = [column.removeprefix(metric) for metric in metrics if column.startswith(metric)]
    return any(rest in endings or rest.startswith((SEPARATOR, "_by_")) for rest in rests)


def _agree(was: Any, now: Any) -> bool:
    """Whether two JSON values are equal up to the last digits; ``None`` also equals the text of a function."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        return all(_agree(was.get(key), now.get(key)) for key in {**was, **now})
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return all(map(_agree, was, now))
    if isinstance(was, float) and isinstance(now, float):
        both = math.isnan(was) and math.isnan(now)
        return both or math.isclose(was, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(was == now) or (now is None and isinstance(was, str) and was.startswith("<"))
