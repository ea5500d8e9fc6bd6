"""Names and one-line descriptions of the tasks and groups, from their YAML files.

A task's line is the key ``summary`` of its YAML, of its protocol as a rule, after the name of its records. A group's is
``summary`` in its ``metadata``: lm-eval passes other keys of a group to its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.tasks import TaskManager

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.plugins import import_object, registered
from lm_eval_tasks.common.records.benchmark import ENTRY_POINTS, Benchmark
from lm_eval_tasks.folder import TASKS_DIR, folder_of

logger = get_logger("lm_eval.editing_tasks")


class TaskRow(NamedTuple):
    """A task or group: its name, ``task`` or ``group``, its folder or its package, its description."""

    name: str
    kind: str
    folder: str
    description: str


def list_tasks() -> list[TaskRow]:
    """All tasks and groups of this project and of other packages' benchmarks, by folder, groups first.

    Raises:
        EditingError: for one of this project without a description, and for two packages that register one name.
    """
    packages = _package_folders()
    # In the order of `lm_eval`, in which no other package replaces one of our tasks.
    manager = TaskManager(include_path=[*packages, TASKS_DIR], include_defaults=False)
    entries = [(name, entry.cfg, entry.yaml_path) for name, entry in manager.task_index.items() if entry.yaml_path]
    ours = [_describe(*entry) for entry in entries if entry[2].is_relative_to(TASKS_DIR)]
    theirs = [
        _describe_foreign(name, config, next(packages[folder] for folder in packages if path.is_relative_to(folder)))
        for name, config, path in entries
        if not path.is_relative_to(TASKS_DIR)
    ]
    return [row for rows in (ours, theirs) for row in sorted(rows, key=lambda row: (row.folder, row.kind, row.name))]


def _package_folders() -> dict[Path, str]:
    """Folders of the tasks of other packages, and the packages' names; a missing one is named and left out."""
    folders = {}
    for entry in registered(ENTRY_POINTS).values():
        try:
            folders[Path(folder_of(entry.module))] = entry.module.partition(".")[0]
        except ModuleNotFoundError as error:
            logger.warning("tasks of benchmark %r are not listed: %s", entry.name, error)
    return folders


def _describe(name: str, config: Mapping[str, Any], path: Path) -> TaskRow:
    summary = _summary(config)
    if not summary:
        where = "its metadata" if "group" in config else "its YAML or the protocol that it includes"
        raise EditingError(f"{path.name}: {name} has no description; add `summary: <one line>` to {where}.")
    return TaskRow(name, _kind(config), path.parent.name, f"{_title(config)}{summary}")


def _describe_foreign(name: str, config: Mapping[str, Any], package: str) -> TaskRow:
    """As :func:`_describe`; a mistake in another package does not take the list away."""
    try:
        title = _title(config)
    except EditingError as error:
        logger.warning("task %s of %s: %s", name, package, error)
        title = ""
    return TaskRow(name, _kind(config), package, f"{title}{_summary(config) or 'no summary'}")


def _kind(config: Mapping[str, Any]) -> str:
    return "group" if "group" in config else "task"


def _summary(config: Mapping[str, Any]) -> str:
    """The line of a task or group; "" if there is none."""
    summary = (config.get("metadata") or {}).get("summary") if "group" in config else config.get("summary")
    return summary.strip() if isinstance(summary, str) else ""


def _title(config: Mapping[str, Any]) -> str:
    """Name of the benchmark of a task; lm-eval's index has functions as text, ``<folder>/<module>.<object>``."""
    if "group" in config or "custom_dataset" not in config:
        return ""
    module, _, attribute = Path(config["custom_dataset"]).name.rpartition(".")
    records = import_object(f"{module}:{attribute}", "records of a task")
    return f"{records.source.title}: " if isinstance(records, Benchmark) else ""
