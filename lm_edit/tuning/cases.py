"""Edit cases as plain questions, for searches over an editor's settings: no task, no protocol, no published number."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, near_misses
from lm_eval_tasks.common.benchmarks import BENCHMARKS
from lm_eval_tasks.common.cases import Case, Question
from lm_eval_tasks.common.dataset import read_rows
from lm_eval_tasks.common.fields import Fields


def load_cases(source: str, settings: Mapping[str, Any]) -> list[Case]:
    """Cases of a benchmark whose ``utils`` module has ``tuning_cases(settings, subset)``, or of a JSON(L) file.

    A file has records ``{"request": {...}, "paraphrases": [text, ...], "neighbors": [{"prompt", "answer"}, ...]}``.

    Raises:
        EditingError: for an unknown source, a benchmark without such questions, and records that do not fit.
    """
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json"):
        return [_parse(record, where) for where, record in read_rows(path)]
    if source not in BENCHMARKS:
        raise EditingError(
            f"no cases of benchmark {source!r}.{near_misses(source, BENCHMARKS)} Accepted: {', '.join(_benchmarks())}, "
            'or a JSONL file of {"request", "paraphrases", "neighbors"}.'
        )
    folder, subset = BENCHMARKS[source]
    load = getattr(_utils(folder), "tuning_cases", None)
    if load is None:
        raise EditingError(f"benchmark {source!r} has no questions to tune on; accepted: {', '.join(_benchmarks())}.")
    return load(settings, subset)


def _benchmarks() -> list[str]:
    return [name for name, (folder, _) in BENCHMARKS.items() if hasattr(_utils(folder), "tuning_cases")]


def _utils(folder: str) -> Any:
    return importlib.import_module(f"lm_eval_tasks.{folder}.utils")


def _parse(record: Any, where: str) -> Case:
    if not isinstance(record, Mapping) or not isinstance(record.get("request"), Mapping):
        raise EditingError(
            f'{where}: a case to tune on is {{"request": {{...}}, "paraphrases": [text], "neighbors": [{{"prompt", '
            '"answer"}]}; plain edit requests do not say what must not change.'
        )
    request = EditRequest.from_dict(record["request"], where=where)
    fields = Fields(record, where)
    paraphrases = [Question(text, request.target_new, request.target_true) for text in fields.texts("paraphrases")]
    neighbors = []
    for number, entry in enumerate(fields.objects("neighbors")):
        inner = Fields(entry, f"{where}, neighbors[{number}]")
        neighbors.append(Question(inner.text("prompt"), inner.text("answer")))
    return Case(request, paraphrases, neighbors)
