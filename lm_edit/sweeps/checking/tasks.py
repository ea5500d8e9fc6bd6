"""Tasks by name, from their YAML files: groups, and the benchmark whose edits a task asks about. No data is read."""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.plugins import import_object
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.startup.task_folders import with_task_folders

TASKS_OF_LM_EVAL = Path(lm_eval.tasks.__file__).parent
NO_CONFIGURATIONS = {".py", ".pyc", ".md", ".json", ".jsonl", ".sh"}


@functools.cache
def _own_tasks() -> Any:
    """lm-eval's index of the tasks of this and of other packages, which takes a tenth of a second."""
    return TaskManager(include_path=with_task_folders(None), include_defaults=False).task_index


@functools.cache
def _all_tasks() -> Any:
    """lm-eval's index of all tasks, which takes seconds."""
    return TaskManager().task_index


@functools.cache
def _tasks_below(folder: str) -> Any:
    """lm-eval's index of one of its own folders."""
    return TaskManager(include_path=[str(TASKS_OF_LM_EVAL / folder)], include_defaults=False).task_index


def _index_of(name: str) -> Any:
    """An index with a task, if there is one: that of packages, of a folder of lm-eval, or of all tasks.

    Most of lm-eval's tasks are in the folder that their name begins with: arc_challenge in arc. A tag can be that of
    tasks in several folders, each of which has a file with its name.
    """
    if name in _own_tasks():
        return _own_tasks()
    words = name.split("_") if re.fullmatch(r"\w+", name) else []
    for length in range(len(words), 0, -1):
        folder = "_".join(words[:length])
        if (TASKS_OF_LM_EVAL / folder).is_dir() and (entry := _tasks_below(folder).get(name)) is not None:
            is_tag = entry.yaml_path is None
            return _all_tasks() if is_tag and _folders_that_name(name) != {folder} else _tasks_below(folder)
    return _all_tasks()


@functools.cache
def _folders_that_name(name: str) -> set[str]:
    """The folders of lm-eval with a name in a file, or with an ``include`` of a file of such a folder."""
    word = re.compile(rb"(?<![\w-])%b(?![\w-])" % name.encode())
    found = {folder for folder, text in _texts().items() if word.search(text)}
    included = re.compile(rb"include:.*\.\./(?:%b)/" % b"|".join(re.escape(folder.encode()) for folder in found))
    return found | {folder for folder, text in _texts().items() if included.search(text)}


@functools.cache
def _texts() -> dict[str, bytes]:
    """Folder -> the text of its configurations; to read them takes a tenth of the time that parsing does.

    Those that others include have any ending.
    """
    texts: dict[str, list[bytes]] = defaultdict(list)
    for path, _, files in os.walk(TASKS_OF_LM_EVAL):
        for folder in Path(path).relative_to(TASKS_OF_LM_EVAL).parts[:1]:
            texts[folder] += [
                Path(path, file).read_bytes() for file in files if Path(file).suffix not in NO_CONFIGURATIONS
            ]
    return {folder: b"\n".join(parts) for folder, parts in texts.items()}


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


def task_metadata(name: str) -> dict[str, Any]:
    """The metadata of a task of this or of another package; none of a group, and of a task that is not installed."""
    config = getattr(_own_tasks().get(name), "cfg", None) or {}
    metadata = config.get("metadata")
    return dict(metadata) if isinstance(metadata, dict) else {}


def _leaves(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and configuration of each task behind a name."""
    index = _index_of(name)
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
