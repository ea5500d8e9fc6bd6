"""TODO: say what is here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError


def load_edits(source: str, settings: Mapping[str, Any], num_edits: int | None) -> list[EditRequest]:
    """The first ``num_edits`` edits of a benchmark (by the name of its task folder) or of a JSONL file.

    Raises:
        EditingError: for an unknown source, malformed lines, too few edits, and edits that occur twice.
    """
    path = Path(source).expanduser()
    requests = _from_file(path) if path.suffix in (".jsonl", ".json") else _from_benchmark(source, settings)
    if num_edits is not None:
        if num_edits > len(requests):
            raise EditingError(f"num_edits={num_edits}, but {source} has {len(requests)} edits.")
        requests = requests[:num_edits]
    seen: dict[str, EditRequest] = {}
    for request in requests:
        if request.key in seen:
            raise EditingError(
                f"edits={source}: cases {seen[request.key].case_id} and {request.case_id} are the same edit; "
                "a stream that makes it twice would score it twice. Remove one."
            )
        seen[request.key] = request
    return requests


def _from_file(path: Path) -> list[EditRequest]:
    """Edit requests from JSON lines (one per line) or a JSON list."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EditingError(f"edits={path} cannot be read: {error.strerror}.") from None
    if text.lstrip().startswith("["):
        rows = [(f"{path}, record {number}", row) for number, row in enumerate(_parse(text, str(path)))]
    else:
        lines = enumerate(text.split("\n"), start=1)
        rows = [(f"{path}, line {n}", _parse(line, f"{path}, line {n}")) for n, line in lines if line.strip()]
    if not rows:
        raise EditingError(f"edits={path} holds no edit request.")
    return [EditRequest.from_dict(row, where=where) for where, row in rows]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise EditingError(f"{where}: not valid JSON ({error.msg}).") from None


def _from_benchmark(name: str, settings: Mapping[str, Any]) -> list[EditRequest]:
    """A benchmark's edits, from the folder of its tasks."""
    from lm_eval_tasks.common.benchmarks import load_edit_requests  # the tasks know their records, we do not

    return load_edit_requests(name, settings)
