"""Names and one-line descriptions of the tasks and groups, from their YAML files.

A task's line is the key ``summary`` of its YAML, of its protocol as a rule, after the name of its records. A group's is
``summary`` in its ``metadata``: lm-eval passes other keys of a group to its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.tasks import TaskManager

import lm_eval_tasks
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.plugins import import_object
from lm_eval_tasks.common.benchmark import Benchmark

FOLDER = Path(lm_eval_tasks.__path__[0])


class TaskRow(NamedTuple):
    """A task or group: its name, ``task`` or ``group``, its folder, its description."""

    name: str
    kind: str
    folder: str
    description: str


def list_tasks() -> list[TaskRow]:
    """All tasks and groups of this package, by folder, groups first.

    Raises:
        EditingError: for one without a description.
    """
    manager = TaskManager(include_path=FOLDER, include_defaults=False)
    rows = [_describe(name, entry.cfg, entry.yaml_path) for name, entry in manager.task_index.items()]
    return sorted(rows, key=lambda row: (row.folder, row.kind, row.name))


def _describe(name: str, config: Mapping[str, Any], path: Path) -> TaskRow:
    is_group = "group" in config
    summary = (config.get("metadata") or {}).get("summary") if is_group else config.get("summary")
    if not isinstance(summary, str) or not summary.strip():
        where = "its metadata" if is_group else "its YAML or the protocol that it includes"
        raise EditingError(f"{path.name}: {name} has no description; add `summary: <one line>` to {where}.")
    title = "" if is_group else _title(config)
    return TaskRow(name, "group" if is_group else "task", path.parent.name, f"{title}{summary}")


def _title(config: Mapping[str, Any]) -> str:
    """Name of the benchmark of a task; lm-eval's index has functions as text, ``<folder>/<module>.<object>``."""
    module, _, attribute = Path(config["custom_dataset"]).name.rpartition(".")
    records = import_object(f"{module}:{attribute}", "records of a task")
    return f"{records.source.title}: " if isinstance(records, Benchmark) else ""
