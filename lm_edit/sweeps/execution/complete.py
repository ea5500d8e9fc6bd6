"""Whether the files that a run has written are complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from lm_edit.results.files.runs import read_result_files


def missing_parts(folder: Path, tasks: Iterable[str]) -> str | None:
    """The parts that a run's files lack; ``None`` if they are complete.

    They are complete with a readable result file of every task, and beside it the samples that it was saved with.
    lm-eval writes the samples last, so a killed run may have a result file without them.
    """
    try:
        newest = read_result_files(folder)[-1]
        known = {name for part in ("results", "groups", "group_subtasks") for name in newest.content.get(part) or ()}
        if missing := [task for task in tasks if task not in known]:
            return f"{newest.path.name} has no {', '.join(missing)}"
        for task in newest.content["n-samples"]:
            found, wanted = len({row["doc_id"] for _, row in newest.samples(task)}), newest.num_cases(task)
            if found != wanted:
                return f"the samples of {task} have {found} of {wanted} documents"
    except EditingError as error:
        return str(error)
    return None
