"""Run tasks on the invented records with scripted models."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from paths import RECORDS
from scripted import Exchange, ScriptedLM
from task_managers import FOLDER, task_manager

from edit_hooks.utils.storage.json_io import read_rows
from lm_eval_tasks.common.records.benchmark import Benchmark, all_benchmarks
from lm_eval_tasks.common.records.cases import OmittedRecord
from lm_eval_tasks.common.records.fields import Fields

# Of benchmarks; the tasks of other folders have no edits.
TASKS = sorted(path.stem for path in FOLDER.glob("*/[!_]*.yaml") if (path.parent / "benchmark.py").exists())


def benchmark_of(task: str) -> Benchmark[Any]:
    """The benchmark of a task or group: the one with the longest name that the task's name starts with."""
    known = all_benchmarks()
    return known[max((name for name in known if task.startswith(name)), key=len)]


def record_file(benchmark: Benchmark[Any]) -> Path:
    """The invented records of a benchmark: the file in tests/records with one of its file names, in any case."""
    names = {name.lower() for name in benchmark.source.files}
    (path,) = [path for path in RECORDS.iterdir() if path.name.lower() in names]
    return path


def kept_records(benchmark: Benchmark[Any]) -> list[dict[str, Any]]:
    """The invented records of a benchmark without those that its release leaves out."""
    kept = []
    for row, (where, record) in enumerate(read_rows(record_file(benchmark))):
        with contextlib.suppress(OmittedRecord):
            benchmark.layout.read(Fields(record, where), row)
            kept.append(record)
    return kept


def data_of(task: str) -> str:
    """The invented records of a task's benchmark."""
    return str(record_file(benchmark_of(task)))


def manager(task: str, **settings: Any) -> TaskManager:
    """A task manager whose tasks read the invented records."""
    return task_manager({"data": data_of(task)} | settings)


def run(task: str, lm: Any = None, settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """`simple_evaluate` on one task or group of one benchmark."""
    return lm_eval.simple_evaluate(
        model=lm or ScriptedLM(), tasks=[task], task_manager=manager(task, **(settings or {})), **options
    )


def run_on_two_ranks(task: str, lm_class: Any, settings: dict[str, Any] | None = None, **script: Any) -> dict[str, Any]:
    """`evaluate` on two ranks, each in a thread; returns the results of the first."""
    exchange = Exchange(2)
    results: list[Any] = [None, None]

    def rank(number: int) -> None:
        loaded = manager(task, **(settings or {})).load([task])
        for built in loaded["tasks"].values():
            built.set_fewshot_seed(0)
        try:
            results[number] = evaluate(lm_class(number, exchange, **script), loaded)
        except BaseException:
            exchange.barrier.abort()
            raise

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results[0] is not None and results[1] is None
    return results[0]


def build(task: str, **settings: Any) -> Any:
    """The task object."""
    return manager(task, **settings).load([task])["tasks"][task]


def metrics_of(results: dict[str, Any], task: str, pipeline: str = "none") -> dict[str, Any]:
    """A task's results of one filter pipeline, under names without the pipeline."""
    suffix = f",{pipeline}"
    return {key.removesuffix(suffix): value for key, value in results["results"][task].items() if key.endswith(suffix)}


def from_nlls(table: dict[tuple[str, str], tuple[float, float]]) -> Any:
    """Likelihoods from (prompt, target) -> (edited NLL, unedited NLL), 2.0 by default; every word is a token."""

    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        assert continuation.startswith(" ") and not context.endswith(" ")
        num_tokens = len(continuation.split())
        nll = table.get((context, continuation[1:]), (2.0, 2.0))[unedited]
        return -nll * num_tokens, list(range(num_tokens))

    return likelihoods
