"""Runs of WILD with and without a judge, and what their files hold."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from judge_server import JudgeServer
from result_files import write_run
from scripted import ScriptedLM, StreamLM
from task_runs import run
from wild_answers import wild_texts

from judges.base import Item
from lm_edit.results.files.provenance import JUDGED_LATER

RELIABILITY = "qaedit_wild_reliability"
STREAM = {"mode": "sequential", "checkpoints": "1;3", "retention": True}


def grade_by_containment(item: Item, attempt: int) -> str:
    """Script of a judge that looks for the gold answer."""
    return "A" if item.gold in item.answer else "B"


def stream() -> StreamLM:
    """A stream of three edits; the unedited model knows the last one."""
    return StreamLM({"0": "110", "1": ".11", "2": "..1"}, {1: 0, 3: 2}, retention=True, known=("2",))


def scripted() -> ScriptedLM:
    """Independent edits, of which one fails."""
    return ScriptedLM(texts=wild_texts, errors={"1": "no such layer"})


def judge_of(server: JudgeServer, store: Path, **settings: Any) -> dict[str, Any]:
    """The settings of a judge on a scripted server."""
    return {"backend": "openai", "model": "scripted", "base_url": server.url, "store": str(store), **settings}


def run_without_judge(folder: Path, task: str = RELIABILITY, **facts: Any) -> Path:
    """Write a run of a scripted model; return its result file."""
    return write_run(folder, results=copy.deepcopy(_results(task)), **facts)


@functools.cache
def _results(task: str) -> dict[str, Any]:
    return run(task, scripted(), bootstrap_iters=0)


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The only result file of a folder without what is about its making, and the samples by task."""
    (path,) = folder.rglob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    for name in (JUDGED_LATER, "start_time", "end_time", "total_evaluation_time_seconds", "date"):
        results.pop(name, None)
    samples = {
        one.name.removeprefix("samples_").rsplit("_", 1)[0]: [json.loads(line) for line in one.open(encoding="utf-8")]
        for one in sorted(folder.rglob("samples_*.jsonl"))
    }
    return results, samples
