"""What a result file records about its making after the run: what was judged later, and what it was merged from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import sha256_of
from lm_edit.results.files.runs import ResultFile
from lm_edit.results.files.shape import TEXT, anything, each, fields, listed

JUDGED_LATER = "judged_later"  # key of a result file: one entry per judging, with date, run, judge, tasks and versions
_JUDGINGS = listed(
    fields({"run": each(TEXT), "judge": each(anything), "tasks": listed(TEXT)}, required=("run", "judge", "tasks"))
)
MERGED_FROM = "merged_from"  # key of a result file: names of the files of which each has some of the tasks


def judgings(file: ResultFile, tasks: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The entries of :data:`JUDGED_LATER`, each with those of its tasks that are among some; ``None``: all.

    Raises:
        EditingError: for entries of another form.
    """
    saved = file.content.get(JUDGED_LATER) or []
    if problem := _JUDGINGS(saved, JUDGED_LATER):
        raise EditingError(
            f"{file.path}: not as lm-edit judge --write-results saves it: {problem}. Judge the run's own files again, "
            "in a new folder."
        )
    found = [{**entry, "tasks": [task for task in entry["tasks"] if tasks is None or task in tasks]} for entry in saved]
    return [entry for entry in found if entry["tasks"]]


def run_of(file: ResultFile, task: str) -> dict[str, str]:
    """Name and SHA-256 of the result file of the run that gave a task's answers: that of this file, if not recorded.

    A file that was judged later has the answers of one run; a merged one has those of several.
    """
    entries: Sequence[Mapping[str, Any]] = judgings(file)
    own = [entry["run"] for entry in entries if task in entry["tasks"]]
    others = [] if MERGED_FROM in file.content else [entry["run"] for entry in entries]
    recorded = next(iter([*own, *others]), None)
    return dict(recorded) if recorded else {"file": file.path.name, "sha256": sha256_of(file.path)}
