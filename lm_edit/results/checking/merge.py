"""One result file per run, from several that were written task by task or again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import write_atomically
from edit_hooks.utils.storage.json_io import json_lines, json_text
from edit_hooks.utils.storage.outputs import check_output_folder
from lm_edit.results.files.provenance import JUDGED_LATER, MERGED_FROM, judgings
from lm_edit.results.files.runs import Paths, ResultFile
from lm_edit.results.tables import current_results

# Parts of a result file with one entry per task or group.
BY_TASK = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")

# Parts of a result file that belong to the protocol of all its tasks (``TaskFacts.protocol``).
PROTOCOL_PARTS = ("chat_template_sha", "system_instruction_sha")


def merge_results(paths: Paths, out: str | Path) -> list[Path]:
    """Write one result file per run, with the newest result of each task, and its samples.

    Results asked with different chat templates or system prompts, of which a file names one, come in several files.

    Returns:
        The files written.

    Raises:
        EditingError: for unreadable results; for a run with two results of one task that differ in data, judge,
            protocol or version; and for a folder that is not empty.
    """
    out = check_output_folder(out)
    by_run: dict[tuple[Any, ...], list[tuple[ResultFile, str]]] = defaultdict(list)
    for file, task in current_results(paths):
        key = (file.facts.run, *(file.content.get(part) for part in PROTOCOL_PARTS))
        by_run[key].append((file, task))
    for places in by_run.values():
        _refuse_two_results(places)
    return [path for places in by_run.values() for path in _write_run(places, out)]


def _refuse_two_results(places: list[tuple[ResultFile, str]]) -> None:
    owner: dict[str, ResultFile] = {}
    for file, task in places:
        if owner.setdefault(task, file) is not file:
            raise EditingError(
                f"{owner[task].path} and {file.path} have different results of {task} in one run: other data, judge, "
                "protocol or version. One file cannot hold both; leave one out."
            )


def _write_run(places: list[tuple[ResultFile, str]], out: Path) -> list[Path]:
    newest = max((file for file, _ in places), key=lambda file: (file.date, file.path.name))
    content: dict[str, Any] = {**newest.content, "task_hashes": {}, MERGED_FROM: []}
    content |= {part: {} for part in BY_TASK if part in newest.content or part != "groups"}
    content |= _of_all_files(places)
    for file, task in places:
        for part in (*BY_TASK, "task_hashes"):
            if task in (saved := file.content.get(part) or {}):
                content.setdefault(part, {})[task] = saved[task]
        if file.path.name not in content[MERGED_FROM]:
            content[MERGED_FROM].append(file.path.name)
    folder = out / newest.facts.name
    if folder.exists():  # another run of the same name
        folder = out / f"{newest.facts.name}__{newest.facts.run}"
    number = 1
    while folder.exists():  # the same run, asked with another chat template
        number += 1
        folder = out / f"{newest.facts.name}__{newest.facts.run}__{number}"
    folder.mkdir(parents=True)
    written = [_write(folder / f"results_{newest.date_id}.json", content)]
    for file, task in places:
        if file.sample_file(task) is not None:
            target = folder / f"samples_{task}_{newest.date_id}.jsonl"
            write_atomically(target, json_lines(row for _, row in file.samples(task)))
            written.append(target)
    return written


def _of_all_files(places: Sequence[tuple[ResultFile, str]]) -> dict[str, Any]:
    """Facts about single tasks that files have in one list.

    These are anomalies, what was compared with the unedited model, and what was judged later.
    Those about a task whose result is taken from another file are left out.
    """
    kept: dict[ResultFile, set[str]] = defaultdict(set)
    for file, task in places:
        kept[file].add(task)
    anomalies: list[Any] = []
    compared: dict[str, Any] = {"tasks": [], "not_compared": {}}
    for file, tasks in kept.items():
        others = file.content["results"].keys() - tasks
        for anomaly in file.content.get("anomalies") or ():
            if anomaly not in anomalies and _task_of(anomaly["text"]) not in others:
                anomalies.append(anomaly)
        own = file.content.get("unedited_comparison") or {"tasks": (), "not_compared": {}}
        compared["tasks"] += [task for task in own["tasks"] if task in tasks]
        reasons = own["not_compared"].items()
        compared["not_compared"] |= {name: reason for name, reason in reasons if _task_of(name) not in others}
    judged = [entry for file, tasks in kept.items() for entry in judgings(file, tasks)]
    found = {"anomalies": anomalies, "unedited_comparison": compared, JUDGED_LATER: judged}
    return {part: value for part, value in found.items() if any(part in file.content for file in kept)}


def _task_of(text: str) -> str:
    """The task that a sentence about a task, or the name of one of its metrics, begins with."""
    return text.partition(":")[0]


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    write_atomically(path, json_text(content, indent=2) + "\n")
    return path
