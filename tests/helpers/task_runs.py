"""Running the tasks on the invented records: what the tests of the task folders share."""

from __future__ import annotations

import threading
from typing import Any

import lm_eval
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from paths import RECORDS, ROOT
from scripted import Exchange, ScriptedLM

FOLDER = ROOT / "lm_eval_tasks"
TASKS = sorted(path.stem for path in FOLDER.glob("*/[!_]*.yaml"))
DATA = {"bake_j": "bake_judge.json", "bake": "bake_qa.jsonl", "qaedit": "qaedit.jsonl"}


def data_of(task: str) -> str:
    """The invented records of a task's benchmark."""
    return str(RECORDS / next(name for prefix, name in DATA.items() if task.startswith(prefix)))


def manager(task: str, **settings: Any) -> TaskManager:
    """A task manager as `lm_eval --include_path` makes one, without lm-eval's own thousands of tasks."""
    return TaskManager(include_path=FOLDER, include_defaults=False, metadata={"data": data_of(task)} | settings)


def run(task: str, lm: Any = None, settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """`simple_evaluate` on one task or group of one benchmark."""
    return lm_eval.simple_evaluate(
        model=lm or ScriptedLM(), tasks=[task], task_manager=manager(task, **(settings or {})), **options
    )


def run_on_two_ranks(task: str, lm_class: Any, settings: dict[str, Any] | None = None, **script: Any) -> dict[str, Any]:
    """`evaluate` on two ranks at once, each in a thread; the first one's results."""
    exchange = Exchange(2)
    found: list[Any] = [None, None]

    def rank(number: int) -> None:
        loaded = manager(task, **(settings or {})).load([task])
        for built in loaded["tasks"].values():
            built.set_fewshot_seed(0)
        try:
            found[number] = evaluate(lm_class(number, exchange, **script), loaded)
        except BaseException:
            exchange.barrier.abort()
            raise

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found[0] is not None and found[1] is None
    return found[0]


def build(task: str, **settings: Any) -> Any:
    """The task object."""
    return manager(task, **settings).load([task])["tasks"][task]


def metrics_of(results: dict[str, Any], task: str, pipeline: str = "none") -> dict[str, Any]:
    """A task's results of one filter pipeline, without its name."""
    suffix = f",{pipeline}"
    return {key.removesuffix(suffix): value for key, value in results["results"][task].items() if key.endswith(suffix)}


def from_nlls(table: dict[tuple[str, str], tuple[float, float]]) -> Any:
    """Likelihoods from (prompt, target) -> (edited NLL, unedited NLL); every word is a token; 2.0 where not listed."""

    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        assert continuation.startswith(" ") and not context.endswith(" ")
        num_tokens = len(continuation.split())
        nll = table.get((context, continuation[1:]), (2.0, 2.0))[unedited]
        return -nll * num_tokens, list(range(num_tokens))

    return likelihoods
