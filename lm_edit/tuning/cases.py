"""Edit cases for the search over an editor's settings, from a benchmark or a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.json_io import read_rows
from lm_eval_tasks.common.records.benchmark import find_benchmark
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.settings import Settings

LAYOUT = '{"request": {...}, "paraphrases": [text], "neighbors": [{"prompt", "answer"}]}'


def load_cases(source: str, settings: Settings) -> list[Case]:
    """The cases of a benchmark, or of a JSON or JSONL file of :data:`LAYOUT`.

    Raises:
        EditingError: for an unknown source, unreadable data, and records that violate the layout.
    """
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json"):
        return [_parse(record, where) for where, record in read_rows(path)]
    return find_benchmark(source, f"a JSON or JSONL file of {LAYOUT}").load(settings).records


def _parse(record: Any, where: str) -> Case:
    if not isinstance(record, Mapping) or not isinstance(record.get("request"), Mapping):
        raise EditingError(
            f"{where}: a case to tune on is {LAYOUT}; a plain edit request has no prompts that must stay unchanged."
        )
    request = EditRequest.from_dict(record["request"], where=where)
    fields = Fields(record, where)
    case = Case(
        request,
        paraphrases=[Question(text, request.target_new, request.target_true) for text in fields.texts("paraphrases")],
        neighbors=[Question(item.text("prompt"), item.text("answer")) for item in fields.objects("neighbors")],
    )
    fields.optional("request")
    if unknown := fields.unread():
        raise unknown_keys_error(f"field in {where}:", unknown, ("request", "paraphrases", "neighbors"))
    return case
