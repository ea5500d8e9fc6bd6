"""Edits of batch and sequential runs.

``edits=`` names a benchmark, or a JSON or JSONL file of edit requests or of a benchmark's records.

Benchmarks belong to a package above this one, which registers a function ``(name or file, settings) -> EditedCases`` as
the entry point ``benchmarks`` of the group :data:`ENTRY_POINTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from edit_hooks.base.editor import Editor
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.prompt_context import AUTO, read_separator
from edit_hooks.request import EditedCases, EditRequest, RequestGroup, describe_texts, with_separator
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.plugins import import_object, registered
from edit_hooks.utils.settings.numbers import require_whole
from edit_hooks.utils.settings.options import parse_checkpoints
from edit_hooks.utils.storage.files import names_file, sha256_of, user_path
from edit_hooks.utils.storage.json_io import JSON_SUFFIXES, read_rows

log = get_logger("lm_eval.edited_hf")

ENTRY_POINTS = "lm_eval_editing.edit_sources"


def read_plan(options: EditingOptions, editor: Editor[Any], settings: Mapping[str, Any]) -> EditPlan:
    """Read the edits of a batch or sequential run, before any weight is loaded; no groups in other modes.

    Args:
        settings: those of :func:`read_edited_cases`.

    Raises:
        EditingError: as there, and for steps of several cases with an editor that writes one request at a time.
    """
    if options.edits is None:
        return EditPlan()
    cases, origin = read_edited_cases(options.edits, settings, options.num_edits)
    size = options.group_size or options.edit_batch_size or (len(cases) if options.mode == "batch" else 1)
    if size > 1 and not options.group_size and not editor.supports_joint:
        raise EditingError(
            f"editor {options.editor!r} writes one request at a time, but the run has steps of {size} cases; use "
            "mode=sequential,edit_batch_size=1 or an editor that writes batches."
        )
    cumulative = not options.group_size
    groups = chunked(cases, size, cumulative=cumulative)
    return EditPlan(groups, cumulative, parse_checkpoints(options.checkpoints), origin=origin)


def load_edits(source: str, settings: Mapping[str, Any], num_edits: int | None) -> list[EditRequest]:
    """The distinct edits of the first ``num_edits`` cases; see :func:`read_edited_cases`."""
    distinct: dict[str, EditRequest] = {}
    for case in load_edited_cases(source, settings, num_edits):
        for request in case:
            distinct.setdefault(request.key, request)
    return list(distinct.values())


def load_edited_cases(source: str, settings: Mapping[str, Any], num_cases: int | None) -> list[RequestGroup]:
    """The edits of each case; see :func:`read_edited_cases`."""
    return read_edited_cases(source, settings, num_cases).cases


def read_edited_cases(source: str, settings: Mapping[str, Any], num_cases: int | None) -> EditedCases:
    """The edits of each of the first ``num_cases`` cases of a benchmark or of a file; of all by default.

    Cases may share edits. With them comes where they were read, and the SHA-256 of the whole file.

    Args:
        source: name of the benchmark, or path of the file. Each of its edit requests is a case; records of a benchmark
            are recognized by their fields.
        settings: for benchmarks: ``data``, ``data_revision``, ``bad_records``, ``subset``, ``subset_seed``,
            ``pretrained``, and the sets of a benchmark, as ``qaedit_set``; for both: ``separator``.

    Raises:
        EditingError: for an unknown source, malformed lines, and too few cases.
    """
    if (rows := read_requests(source)) is not None:
        path = user_path(source, "file of edits")
        separator = read_separator(settings.get("separator", AUTO))
        requests = [with_separator(EditRequest.from_dict(row, where=where), separator) for where, row in rows]
        cases: list[RequestGroup] = [(request,) for request in requests]
        described = {"data": source, "file": path.name, "sha256": sha256_of(path)}
        origin: Mapping[str, Any] = described | describe_texts(requests)
    else:
        cases, origin = _from_benchmark(source, settings)
    if num_cases is not None:
        require_whole("num_edits", num_cases)
        if num_cases > len(cases):
            raise EditingError(f"num_edits={num_cases}, but {source} has {len(cases)} edited cases.")
        cases = cases[:num_cases]
    _warn_of_repeated(source, cases)
    _warn_of_conflicts(source, cases)
    return EditedCases(cases, origin)


def _warn_of_repeated(source: str, cases: Sequence[RequestGroup]) -> None:
    first: dict[frozenset[str], RequestGroup] = {}
    repeated = []
    for case in cases:
        key = frozenset(request.key for request in case)
        if first.setdefault(key, case) is not case:
            repeated.append((first[key][0].case_id, case[0].case_id))
    if repeated:
        log.warning(
            "edits=%s: %d of %d cases have the same edits as an earlier one, first case %s and %s; a stream makes them "
            "once, and every case is scored.",
            source,
            len(repeated),
            len(cases),
            *repeated[0],
        )


def _warn_of_conflicts(source: str, cases: Sequence[RequestGroup]) -> None:
    """Log prompts to which cases want several answers, which one group or stream cannot all have."""
    targets: dict[str, dict[str, None]] = {}
    for case in cases:
        for request in case:
            targets.setdefault(request.text, {})[request.target_new] = None
    conflicts = {text: list(wanted) for text, wanted in targets.items() if len(wanted) > 1}
    if conflicts:
        text, wanted = next(iter(conflicts.items()))
        log.warning(
            "edits=%s: the cases want several answers to %d of %d edit prompts, first %s to %r; cases "
            "that share a group or stream contradict each other there.",
            source,
            len(conflicts),
            len(targets),
            " and ".join(map(repr, wanted)),
            text,
        )


def read_requests(source: str) -> list[tuple[str, Any]] | None:
    """The rows of a file of edit requests, each after its location; ``None`` for other files and for a benchmark.

    Raises:
        EditingError: for a file that cannot be read or is malformed.
    """
    if not names_file(source) or (path := user_path(source, "file of edits")).suffix not in JSON_SUFFIXES:
        return None
    rows = read_rows(path, "file of edits")
    known = {field.name for field in fields(EditRequest)}
    return rows if all(known.issuperset(row) for _, row in rows if isinstance(row, Mapping)) else None


def _from_benchmark(name: str, settings: Mapping[str, Any]) -> EditedCases:
    """The edits of each case of a benchmark, or of a file of its records, from the registered function."""
    entry = registered(ENTRY_POINTS).get("benchmarks")
    if entry is None:
        raise EditingError(
            f"edits={name}: no package with benchmarks is registered. Install lm-eval-editing (in a clone: "
            "pip install -e ., again after an update), or give a JSON or JSONL file of edit requests."
        )
    load: Callable[[str, Mapping[str, Any]], EditedCases] = import_object(entry.value, "edit source")
    return load(name, settings)
