"""Rows of lm-eval's sample files, held against the hashes that the run recorded.

Everything that reads samples reads them here: what was lost, doubled, moved or changed after the run is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_rows
from lm_edit.results.files.result_shape import EDITING_DOCUMENT, SAMPLE

REMEDY = (
    "Copy the samples and their result file again as lm_eval wrote them, or run the task again (finished edits and "
    "answers come from the store)."
)
MAX_NAMED = 3  # documents that a message names

Row: TypeAlias = Mapping[str, Any]


class ExpectedSamples(NamedTuple):
    """What a result file records of the samples of one task.

    Attributes:
        file: name of the result file.
        digest: its ``task_hashes`` entry; ``None`` where it has none, as for runs without samples.
        num_documents: number of documents that were asked; ``None`` if unknown.
    """

    file: str
    digest: str | None
    num_documents: int | None


def read_samples(path: Path, expected: ExpectedSamples | None) -> list[tuple[str, Row]]:
    """The samples of a task, each after its location; a document has one for each filter of the task.

    Args:
        expected: what the result file records; ``None`` without one, where only the rows themselves can be checked.

    Raises:
        EditingError: for rows of another form, and for samples that are not those of the run.
    """
    rows = read_rows(path, "file of samples", finite=False, halves="replace")
    for where, row in rows:
        _check_row(where, row)
    samples = [row for _, row in rows]
    if problem := _difference(samples, expected):
        raise EditingError(f"{path}: {problem} {REMEDY}")
    return rows


def hash_of_samples(rows: Sequence[Row]) -> str:
    """lm-eval's ``task_hashes``: SHA-256 of the hashes of all documents, prompts and targets."""
    parts = (str(row.get(name, "")) for row in rows for name in ("doc_hash", "prompt_hash", "target_hash"))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _check_row(where: str, row: object) -> None:
    """Refuse what is no sample, and a sample whose texts do not have the hashes beside them."""
    problem = SAMPLE(row, "")
    if not problem and isinstance(row, Mapping) and isinstance(doc := row.get("doc"), Mapping) and "probes" in doc:
        problem = EDITING_DOCUMENT(doc, "doc")
    if problem or not isinstance(row, Mapping):
        raise EditingError(f"{where}: not a sample as lm-eval saves it: {problem}.")
    for name, text in _hashed_texts(row):
        if row.get(name) not in (None, hashlib.sha256(text.encode()).hexdigest()):
            raise EditingError(
                f"{where}: the {name.removesuffix('_hash')} of document {row['doc_id']} is not the one that the run "
                f"had: its {name} is another. {REMEDY}"
            )


def _hashed_texts(row: Row) -> Iterator[tuple[str, str]]:
    """Hash of a row -> the text of the row that it is about.

    Editing tasks add the question to what is hashed of a document; their documents are compared where the task is built
    again (:mod:`lm_edit.judged_results.checks`).
    """
    arguments = row.get("arguments")
    first = next(iter(arguments.values()), None) if isinstance(arguments, Mapping) else None
    if isinstance(first, Mapping) and isinstance(prompt := first.get("arg_0"), str):
        yield "prompt_hash", prompt
    if isinstance(target := row.get("target"), str):
        yield "target_hash", target
    if isinstance(doc := row.get("doc"), Mapping) and "probes" not in doc:
        yield "doc_hash", json.dumps(doc, indent=2, ensure_ascii=False)


def _difference(samples: Sequence[Row], expected: ExpectedSamples | None) -> str:
    """What differs between samples and the run that they should be of; "" if nothing does."""
    is_the_runs = expected is not None and expected.digest == hash_of_samples(samples)
    by_filter: dict[str, list[int]] = {}
    for row in samples:
        by_filter.setdefault(str(row.get("filter", "")), []).append(row["doc_id"])
    for documents in by_filter.values():
        if repeated := sorted(number for number, count in Counter(documents).items() if count > 1):
            return f"documents {_named(repeated)} are in the samples more than once."
    if is_the_runs:
        return ""
    known = set().union(*by_filter.values())
    if expected is not None and expected.num_documents not in (None, len(known)):
        return f"{len(known)} documents in the samples, but {expected.num_documents} were asked ({expected.file})."
    for name, documents in by_filter.items():
        if lacking := sorted(known.difference(documents)):
            return f"the samples of filter {name!r} lack documents {_named(lacking)}, which other filters have."
    if expected is None or expected.digest is None:
        return ""
    if expected.digest == hash_of_samples(_in_order(samples)):
        return f"the samples are in another order than when {expected.file} was saved."
    return f"not the file that {expected.file} was saved with: samples are missing, changed, or of another task or run."


def _in_order(samples: Sequence[Row]) -> list[Row]:
    """The samples by filter and document, as lm-eval writes them."""
    filters = list(dict.fromkeys(str(row.get("filter", "")) for row in samples))
    return sorted(samples, key=lambda row: (filters.index(str(row.get("filter", ""))), row["doc_id"]))


def _named(documents: Sequence[int]) -> str:
    more = f" and {len(documents) - MAX_NAMED} more" if len(documents) > MAX_NAMED else ""
    return ", ".join(map(str, documents[:MAX_NAMED])) + more
