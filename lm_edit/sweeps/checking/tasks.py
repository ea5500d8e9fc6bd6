"""Tasks by name, from their YAML files: groups, and the benchmark whose edits a task asks about. No data is read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.plugins import import_object
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.folder import TASKS_DIR


@functools.cache
def _own_tasks() -> Any:
    """lm-eval's index of the tasks of this package alone, which takes a tenth of a second."""
    return TaskManager(include_path=[str(TASKS_DIR)], include_defaults=False).task_index


@functools.cache
def _all_tasks() -> Any:
    """lm-eval's index of all tasks, which takes seconds."""
    return TaskManager().task_index


def leaf_tasks(name: str) -> tuple[str, ...]:
    """The tasks behind a name: itself, or the members of a group or tag.

    Raises:
        EditingError: for an unknown name, with near misses.
    """
    return tuple(dict.fromkeys(task for task, _ in _leaves(name)))


def benchmarks_of(name: str) -> list[Benchmark[Any]]:
    """The distinct benchmarks of a task or group; none for tasks without edits.

    Raises:
        EditingError: as :func:`leaf_tasks`.
    """
    found = {}
    for _, config in _leaves(name):
        # lm-eval's index has the reference as text, below the folder of the file that holds it
        reference = Path(str(config.get("custom_dataset") or "")).name
        module, _, attribute = reference.rpartition(".")
        if module:
            benchmark = import_object(f"{module}:{attribute}", "benchmark")
            if isinstance(benchmark, Benchmark):
                found[benchmark.name] = benchmark
    return list(found.values())


def _leaves(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and configuration of each task behind a name."""
    index = _own_tasks() if name in _own_tasks() else _all_tasks()
    if name not in index:
        raise EditingError(f"there is no task {name!r}.{near_misses(name, index)} lm_eval ls tasks lists all.")
    entry = index[name]
    config = entry.cfg or {}
    members = config.get("task")
    if not isinstance(members, list) and not entry.tags:
        yield name, config
    elif not isinstance(members, list):
        members = sorted(entry.tags) if not config else []
        if config:  # a task that carries tags
            yield name, config
    for member in members if isinstance(members, list) else ():
        if isinstance(member, str):
            yield from _leaves(member)
        elif isinstance(member.get("task"), str):  # a task with overrides inside of a group
            yield member["task"], {**config, **member}
