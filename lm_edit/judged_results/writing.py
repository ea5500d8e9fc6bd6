"""Result and sample files with judged columns, all of them or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from edit_hooks.lm.versions import installed_versions
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import sha256_of
from edit_hooks.utils.json_io import read_json
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.scopes import undone
from lm_edit.judged_results.replay import Judged, Row
from lm_edit.results.runs import ResultFile, hash_of_samples
from lm_eval_tasks.common.anomalies import find_anomalies

log = get_logger(__name__)

JUDGED_LATER = "judged_later"  # key of a result file: that it was judged after the run, when, and from which answers
PART = ".part"  # ending of files that are not complete, which no command reads


def provenance(file: ResultFile) -> dict[str, str]:
    """Name and SHA-256 of the result file of the run whose answers are judged, also where a judge was there before."""
    earlier = file.content.get(JUDGED_LATER)
    return dict(earlier["run"]) if earlier else {"file": file.path.name, "sha256": sha256_of(file.path)}


def existing_output(out: Path, file: ResultFile, judge: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the result files in an output folder that have the verdicts of this judge on the answers of this run."""
    for path in sorted((out / file.facts.name).glob("results_*.json")):
        content = read_json(path, "result file", finite=False)
        known = content.get(JUDGED_LATER) if isinstance(content, Mapping) else None
        if known and known["run"]["file"] == provenance(file)["file"] and known["judge"] == judge:
            yield path


def refuse_existing(out: Path, file: ResultFile, judge: Mapping[str, Any]) -> None:
    """Refuse to judge again what the output folder has.

    Raises:
        EditingError: as described.
    """
    for path in existing_output(out, file, judge):
        raise EditingError(
            f"{path} has the verdicts of this judge on {file.path} already; name another folder, or replace the file "
            "with --overwrite."
        )


class Output:
    """Files under temporary names until all are complete."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._parts: list[Path] = []
        self._replaced: list[Path] = []
        self.written: list[Path] = []
        self._is_complete = False

    def add(self, file: ResultFile, judged: Mapping[str, Judged], judge: Mapping[str, Any]) -> None:
        """Add the result file of a run with judged tasks, and its samples."""
        folder = self.out / file.facts.name
        folder.mkdir(parents=True, exist_ok=True)
        self._replaced += existing_output(self.out, file, judge)
        date = _date_id(file, folder)
        content = _content(file, judged, judge)
        for task in file.tasks:
            target = folder / f"samples_{task}_{date}.jsonl"
            if task in judged:
                self._write(target, "".join(_lines(judged[task].samples)))
            elif (source := file.sample_file(task)) is not None:
                shutil.copyfile(source, self._part_of(target))
        self._write(folder / f"results_{date}.json", json.dumps(content, indent=2, ensure_ascii=False))

    def _part_of(self, target: Path) -> Path:
        self._parts.append(target.with_name(f"{target.name}{PART}"))
        return self._parts[-1]

    def _write(self, target: Path, text: str) -> None:
        self._part_of(target).write_text(text, encoding="utf-8", newline="\n")

    def publish(self) -> None:
        """Give the files their names, samples before their result file; remove those that they replace."""
        for part in self._parts:
            target = part.with_name(part.name.removesuffix(PART))
            self.written.append(target)
            part.replace(target)
        self._is_complete = True
        for path in self._replaced:
            date = path.stem.removeprefix("results_")
            for old in (path, *path.parent.glob(f"samples_*_{date}.jsonl")):
                old.unlink()

    def discard(self) -> None:
        """Remove everything, unless all is published."""
        for path in () if self._is_complete else (*self._parts, *self.written):
            path.unlink(missing_ok=True)


@contextmanager
def output(out: Path) -> Iterator[Output]:
    """Scope in which files are added to an output; at its end they appear, and after an exception none does."""
    files = Output(out)
    with undone(files.discard):
        yield files
        files.publish()


def _lines(rows: Iterable[Row]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _date_id(file: ResultFile, folder: Path) -> str:
    """The date in the names of new files: now, as lm-eval writes it, but later than that of the run.

    Files of one run with the same start are ordered by name, also where the clocks of two machines differ.
    """
    dates = [file.date_id, *(path.stem.removeprefix("results_") for path in folder.glob("results_*.json*"))]
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


def _content(file: ResultFile, judged: Mapping[str, Judged], judge: Mapping[str, Any]) -> dict[str, Any]:
    """The result file of the run with the judged tasks in place of their entries."""
    content: dict[str, Any] = deepcopy(dict(file.content))
    for task, result in judged.items():
        content["results"][task], content["configs"][task] = result.columns, result.config
        content.setdefault("task_hashes", {})[task] = hash_of_samples(result.samples)
    if "anomalies" in content:
        content["anomalies"] = find_anomalies(content)
    for group in content.get("groups") or {}:
        if any(member in judged for member in _leaves(file, group)):
            log.warning("%s: the score of group %s is that of the run; it has no judged column", file.path, group)
    content[JUDGED_LATER] = {
        "date": datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
        "run": provenance(file),
        "judge": dict(judge),
        "tasks": list(judged),
        "versions": installed_versions(),
    }
    return content


def _leaves(file: ResultFile, group: str) -> Iterator[str]:
    """The tasks of a group, also those of groups in it."""
    for member in file.groups.get(group, ()):
        yield member
        yield from _leaves(file, member)
