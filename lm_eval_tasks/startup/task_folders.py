"""Folders that lm-eval's task manager scans: ours, and those of the benchmarks that other packages register."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from lm_eval_tasks.folder import TASKS_DIR, folder_of
from lm_eval_tasks.startup.lazy_index import make_lazy
from lm_eval_tasks.startup.report import report

# Entry-point group of other packages' benchmarks; the YAML files of their tasks are beside the module that it names.
BENCHMARKS = "lm_eval_editing.benchmarks"


def add_task_folders(manager: ModuleType) -> None:
    """Make ``TaskManager`` scan the folders of editing tasks beside the default ones, these only if needed."""
    task_manager = manager.TaskManager
    original = task_manager.__init__
    if getattr(original, "_lm_eval_editing", False):
        return
    signature = inspect.signature(original)
    if missing := {"include_path", "include_defaults"} - signature.parameters.keys():
        raise TypeError(f"TaskManager no longer takes {sorted(missing)}; use --include_path {TASKS_DIR}")

    fill_lazily = make_lazy(task_manager)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if not bound.arguments["include_defaults"]:
            return original(*bound.args, **bound.kwargs)
        include_path = bound.arguments["include_path"]
        folders = with_task_folders(include_path)
        places = [os.path.abspath(folder) for folder in folders]  # the working folder can be another one later

        def fill(manager: Any, with_defaults: bool) -> None:
            bound.arguments["include_path"] = folders if manager is self else places
            bound.arguments["include_defaults"] = with_defaults
            original(manager, *bound.args[1:], **bound.kwargs)
            if hasattr(manager, "include_path"):
                manager.include_path = include_path  # unchanged for the caller

        return fill_lazily(self, fill)

    vars(init)["_lm_eval_editing"] = True
    task_manager.__init__ = init
    if (check := getattr(task_manager, "_check_duplicates", None)) is not None:
        task_manager._check_duplicates = staticmethod(_accepting_shared_tasks(check))


def _accepting_shared_tasks(check: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """lm-eval's check of tasks that are chosen twice, for editing tasks.

    Groups that share a task run together: it is one task, with one result for both. A task that is named beside its
    group is refused in a sentence.
    """

    @functools.wraps(check)
    def checked(built: list[Any]) -> None:
        from edit_hooks.utils.errors import EditingError

        named = {item.task_name: item for item in built if not hasattr(item, "get_all_tasks")}
        for group in (item for item in built if hasattr(item, "get_all_tasks")):
            for task in group.get_all_tasks():
                if task.task_name in named and hasattr(task, "benchmark"):
                    raise EditingError(
                        f"the task {task.task_name} is part of the group {group.name}, which is also chosen; drop "
                        f"{task.task_name} from --tasks."
                    )
        check([item for item in built if not _holds_editing_tasks_only(item)])

    return checked


def _holds_editing_tasks_only(item: Any) -> bool:
    tasks = item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item]
    return all(hasattr(task, "benchmark") for task in tasks)


def with_task_folders(include_path: Any) -> list[Any]:
    """The include path with our folders first, since lm-eval lets later folders override earlier ones.

    A folder that the user gives, too, is scanned once.
    """
    if not include_path:
        own = []
    elif isinstance(include_path, (list, tuple)):
        own = list(include_path)
    else:
        own = [include_path]
    known = {os.path.realpath(path) for path in own}
    # Other packages come before us, so that none of them replaces a task of a published benchmark.
    return [folder for folder in (*_plugin_folders(), str(TASKS_DIR)) if os.path.realpath(folder) not in known] + own


def _plugin_folders() -> list[str]:
    """The task folders of the benchmarks that other packages register; a broken entry point is reported and skipped."""
    folders = []
    try:
        for entry in entry_points(group=BENCHMARKS):
            try:
                folders.append(folder_of(entry.module))
            except Exception as error:
                report(f"could not find the tasks of benchmark {entry.name!r}", error)
    except Exception as error:
        report("could not read the entry points of benchmarks", error)
    return list(dict.fromkeys(folders))
