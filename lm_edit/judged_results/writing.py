"""Result and sample files with judged columns: of each run all of them or none, also after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from edit_hooks.lm.loading.versions import installed_versions
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import remove_at_once, replacing
from edit_hooks.utils.storage.json_io import json_lines, json_text
from lm_edit.judged_results.replay import JudgedTask
from lm_edit.results.files.provenance import JUDGED_LATER, judgings, run_of
from lm_edit.results.files.runs import ResultFile, finished_files, read_result_file
from lm_edit.results.files.sample_rows import hash_of_samples
from lm_eval_tasks.report.printing.anomalies import find_anomalies

log = get_logger(__name__)

FOLDER = "judged_"  # and the date in the names of its files: a folder of one output, below that of the run


def written_before(out: Path, file: ResultFile, judge: Mapping[str, Any]) -> dict[str, ResultFile]:
    """Task -> the newest file in an output folder with the verdicts of this judge on its answers in this run."""
    runs = {task: run_of(file, task) for task in file.tasks}
    return {
        task: earlier
        for earlier in _outputs(out, file)
        for entry in judgings(earlier, file.tasks)
        for task in entry["tasks"]
        if entry["judge"] == judge and entry["run"] == runs[task]
    }


def _outputs(out: Path, file: ResultFile) -> list[ResultFile]:
    """The result files in the folder of a run's outputs, oldest first."""
    found = finished_files(out / file.facts.name, "results_*.json")
    return [read_result_file(path) for path in sorted(found, key=lambda path: path.name)]


def write_judged(out: Path, file: ResultFile, judged: Mapping[str, JudgedTask], judge: Mapping[str, Any]) -> Path:
    """Write the results of a run with judged tasks, and their samples.

    The other tasks are those of the last output with verdicts of this judge on this run, else those of the run. Outputs
    whose verdicts are all in the new one, or are replaced by it, are removed.

    Returns:
        The result file.
    """
    before = written_before(out, file, judge)
    newest = max(before.values(), key=lambda earlier: earlier.path.name, default=file)
    base = newest if file.tasks.keys() <= newest.tasks.keys() else file
    content = _content(file, base, judged, judge)
    date = _date_id(file, out / file.facts.name)
    folder = out / file.facts.name / f"{FOLDER}{date}"
    with replacing(folder) as made:
        made.mkdir(parents=True)
        for task in base.tasks:
            target = made / f"samples_{task}_{date}.jsonl"
            if task in judged:
                _write(target, json_lines(judged[task].samples))
            elif (source := base.sample_file(task)) is not None:
                shutil.copyfile(source, target)
        _write(made / f"results_{date}.json", json_text(content, indent=2))
    written = read_result_file(folder / f"results_{date}.json")
    for earlier in _outputs(out, file):
        is_ours = earlier.path.parent.name.startswith(FOLDER) and earlier.path != written.path
        if is_ours and _verdicts(earlier) <= _verdicts(written):
            remove_at_once(earlier.path.parent)
    return written.path


def _verdicts(file: ResultFile) -> set[str]:
    """Run, judge and task of all verdicts of a file."""
    return {json.dumps([entry["run"], entry["judge"], task]) for entry in judgings(file) for task in entry["tasks"]}


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8", newline="\n")


def _date_id(file: ResultFile, folder: Path) -> str:
    """The date in the names of new files: now, as lm-eval writes it, but later than that of the run.

    Files of one run with the same start are ordered by name, also where the clocks of two machines differ.
    """
    earlier = finished_files(folder, "results_*.json*")
    dates = [file.date_id, *(path.stem.removeprefix("results_") for path in earlier)]
    after = [parsed + timedelta(microseconds=1) for date in dates if (parsed := _parse_date(date)) is not None]
    return max([datetime.now(), *after]).isoformat(timespec="microseconds").replace(":", "-")


def _parse_date(date: str) -> datetime | None:
    day, _, time = date.partition("T")
    try:
        return datetime.fromisoformat(
            f"{day}T{time[:8].replace('-', ':')}{time[8:15].ljust(7, '0') if time[8:] else ''}"
        )
    except ValueError:
        return None


def _content(
    file: ResultFile, base: ResultFile, judged: Mapping[str, JudgedTask], judge: Mapping[str, Any]
) -> dict[str, Any]:
    """A result file with the judged tasks in place of their entries.

    Args:
        file: that with the judged answers. base: that with all other tasks.
    """
    content: dict[str, Any] = deepcopy(dict(base.content))
    for task, result in judged.items():
        content["results"][task], content["configs"][task] = result.columns, result.config
        content.setdefault("task_hashes", {})[task] = hash_of_samples(result.samples)
    if "anomalies" in content:
        content["anomalies"] = find_anomalies(content)
    for group in content.get("groups") or {}:
        if file.members(group) & judged.keys():
            log.warning("%s: the score of group %s is that of the run; it has no judged column", file.path, group)
    kept = judgings(base, base.tasks.keys() - judged.keys())
    content[JUDGED_LATER] = [*kept, *_new_judgings(file, judged, judge)]
    return content


def _new_judgings(file: ResultFile, tasks: Iterable[str], judge: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An entry for each run whose answers are judged: one, unless the file is a merged one."""
    runs = {task: run_of(file, task) for task in tasks}
    for run in {tuple(run.items()): run for run in runs.values()}.values():
        yield {
            "date": datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
            "run": run,
            "judge": dict(judge),
            "tasks": [task for task, of_task in runs.items() if of_task == run],
            "versions": installed_versions(),
        }
