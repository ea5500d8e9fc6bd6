"""Edits of batch and sequential runs.

``edits=`` names a benchmark, or a JSON or JSONL file of edit requests.

Benchmarks belong to a package above this one, which registers a function ``(name, settings) -> edit requests`` as the
entry point ``benchmarks`` of the group :data:`ENTRY_POINTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import user_path
from edit_hooks.utils.json_io import read_rows
from edit_hooks.utils.numbers import require_whole
from edit_hooks.utils.plugins import import_object, registered

ENTRY_POINTS = "lm_eval_editing.edit_sources"


def load_edits(source: str, settings: Mapping[str, Any], num_edits: int | None) -> list[EditRequest]:
    """The first ``num_edits`` edits of a benchmark or of a file; all by default.

    Args:
        source: name of the benchmark, or path of the file.
        settings: for benchmarks: ``data``, ``data_revision``, ``bad_records``, ``subset``, ``subset_seed``,
            ``pretrained``, and the sets of a benchmark, as ``qaedit_set``.

    Raises:
        EditingError: for an unknown source, malformed lines, too few edits, and duplicate edits.
    """
    if is_file(source):
        rows = read_rows(user_path(source, "file of edit requests"), "file of edit requests")
        requests = [EditRequest.from_dict(row, where=where) for where, row in rows]
    else:
        requests = _from_benchmark(source, settings)
    if num_edits is not None:
        require_whole("num_edits", num_edits)
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


def is_file(source: str) -> bool:
    """Whether ``edits=source`` names a file of edit requests, not a benchmark."""
    return Path(source).suffix in (".jsonl", ".json")


def _from_benchmark(name: str, settings: Mapping[str, Any]) -> list[EditRequest]:
    """The edits of a benchmark, from the registered function."""
    entry = registered(ENTRY_POINTS).get("benchmarks")
    if entry is None:
        raise EditingError(
            f"edits={name}: no package with benchmarks is registered. Install lm-eval-editing (in a clone: "
            "pip install -e ., again after an update), or give a JSON or JSONL file of edit requests."
        )
    load: Callable[[str, Mapping[str, Any]], list[EditRequest]] = import_object(entry.value, "edit source")
    return load(name, settings)
