"""Blocks on benchmarks: tasks, settings, a record, words of columns, and the maps of published tables."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from block import ROOT, Block, definition, table
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

sys.path.append(str(ROOT / "scripts"))
from published_tables import SOURCE, render

from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.common.settings import COMMON_SETTINGS, Setting
from lm_eval_tasks.report.catalog import TaskRow, list_tasks
from lm_eval_tasks.report.glossary import QUESTIONS, SCORES

TASKS = ROOT / "lm_eval_tasks"


@functools.cache
def _tasks() -> list[TaskRow]:
    return list_tasks()


def tasks(folder: str) -> Block:
    """Groups and tasks of a folder; of all folders without one."""
    rows = [row for row in _tasks() if not folder or row.folder == folder]
    shown = [[f"`{row.name}`", row.kind, *([] if folder else [row.folder]), row.description] for row in rows]
    return Block(table(["task", "", *([] if folder else ["folder"]), "asks"], shown))


def task_columns(folder: str) -> Block:
    """Columns of each task of a folder."""
    names = [row.name for row in _tasks() if row.folder == folder and row.kind == "task"]
    index = TaskManager(include_path=str(TASKS), include_defaults=False).task_index
    metrics = {name: load_yaml(index[name].yaml_path, resolve_func=False)["metric_list"] for name in names}
    shown = [[f"`{name}`", ", ".join(f"`{one['metric']}`" for one in found)] for name, found in metrics.items()]
    return Block(table(["task", "columns"], shown))


def common_settings(_: str) -> Block:
    """Settings that every task reads from its metadata."""
    return Block(_definitions(COMMON_SETTINGS))


def benchmark_settings(folder: str) -> Block:
    """Settings of the benchmarks of a folder, beside the common ones."""
    found = {setting.name: setting for benchmark in benchmarks_of(folder) for setting in benchmark.declared_settings}
    return Block(_definitions(found.values()) or "The common settings only.")


def benchmarks_of(folder: str) -> list[Any]:
    """Benchmarks whose records are in a folder."""
    return [found for found in all_benchmarks().values() if type(found).__module__ and _folder_of(found) == folder]


def _folder_of(benchmark: Any) -> str:
    return str(benchmark.parse.__module__.split(".")[1])


def _definitions(settings: Iterable[Setting[Any]]) -> str:
    return "\n\n".join(definition(f"`{one.name}`", one.help, f"Accepted: {one.accepted}.") for one in settings)


def record(path: str) -> Block:
    """The first record of an embedded sample, without where it is from; ``path`` is relative to the tasks."""
    first = (TASKS / path).read_text(encoding="utf-8").splitlines()[0]
    fields = {key: value for key, value in json.loads(first).items() if key != "provenance"}
    return Block(f"```json\n{json.dumps(fields, indent=1, ensure_ascii=False)}\n```")


def questions(_: str) -> Block:
    """First words of columns: the question that is asked."""
    return Block(_words(QUESTIONS))


def scores(_: str) -> Block:
    """Last words of columns: how the answer is obtained and scored."""
    return Block(_words(SCORES))


def _words(words: Any) -> str:
    return "\n\n".join(definition(f"`{word}`", meaning) for word, meaning in words.items())


def published(benchmark: str) -> Block:
    """The map from the published tables of a benchmark to columns."""
    maps = yaml.safe_load(Path(SOURCE).read_text(encoding="utf-8"))
    return Block(render(maps[benchmark]))


BENCHMARK_BLOCKS: dict[str, Callable[[str], Block]] = {
    "tasks": tasks,
    "task-columns": task_columns,
    "common-settings": common_settings,
    "benchmark-settings": benchmark_settings,
    "record": record,
    "questions": questions,
    "scores": scores,
    "published": published,
}
