"""Check of records without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_hooks.lm.options.edit_sources import read_requests
from edit_hooks.request import EditRequest, describe_texts, require_text
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.storage.files import names_file
from edit_hooks.utils.text.scripts import invisible_characters, writes_spaces
from lm_eval_tasks.common.records.benchmark import all_benchmarks, check_data, find_benchmark, load_own_file
from lm_eval_tasks.common.records.dataset import LoadedRecords
from lm_eval_tasks.common.settings import BAD_RECORDS, Settings

SKIP: Settings = {BAD_RECORDS.name: "skip"}


@dataclass(frozen=True)
class Validation:
    """The result of a check.

    Attributes:
        source: origin of the records (JSON-able).
        num_good: valid records.
        problems: location of every other record -> reason.
        repeated: pairs of locations with the same edit; no error; batch and sequential runs make the edit once.
        notes: sentences about valid records that are probably mistakes.
    """

    source: dict[str, Any]
    num_good: int
    problems: dict[str, str] = field(default_factory=dict)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def validate(target: str, settings: Settings) -> Validation:
    """Check all records of a benchmark, or of a JSON or JSONL file of edit requests or of a benchmark's records.

    Args:
        settings: for benchmarks: ``data``, ``data_revision``.

    Raises:
        EditingError: for an unknown name, and for data that cannot be read at all.
    """
    if target in all_benchmarks():
        check_data(target, settings.get("data"))
        return _validated(find_benchmark(target).load({**settings, **SKIP}))
    if names_file(target) or Path(target).is_file():
        rows = read_requests(target)
        return _validated(load_own_file(target, SKIP)) if rows is None else _validate_requests(target, rows)
    raise EditingError(
        f"{target!r} is neither a benchmark nor a file.{near_misses(target, all_benchmarks())} "
        f"Benchmarks: {', '.join(all_benchmarks())}; use --data to check a benchmark's own file."
    )


def _validated(loaded: LoadedRecords[Any]) -> Validation:
    problems = loaded.source.pop("skipped", {})
    requests = {f"case {case.request.case_id}": case.request for case in loaded.records}
    return Validation(loaded.source, len(loaded.records), problems, _find_repeated(requests), list(_notes(requests)))


def _validate_requests(path: str, rows: Sequence[tuple[str, Any]]) -> Validation:
    requests: dict[str, EditRequest] = {}
    problems: dict[str, str] = {}
    for where, record in rows:
        try:
            request = EditRequest.from_dict(record, where=where)
            require_text(request.text + request.target_new)
            requests[where] = request
        except EditingError as error:
            problems[where] = str(error).removeprefix(f"{where}: ")
    source = {"file": path, **describe_texts(list(requests.values()))}
    return Validation(source, len(requests), problems, _find_repeated(requests), list(_notes(requests)))


# Places for an answer inside of a prompt: of fill-in questions, and of models with masks.
BLANK = re.compile(r"_{3,}|\[MASK\]|<mask>|\uff08\s*\uff09")
FULL_STOPS = (".", "\u3002", "\u0964", "\u06d4")
LONG_TARGET = 500  # words; a text of the benchmarks of texts has up to 400


def _num_words(text: str) -> int:
    """Words, and every letter of a script that writes no spaces between them."""
    return sum(sum(writes_spaces(letter) is False for letter in word) or 1 for word in text.split())


def _find_repeated(requests: Mapping[str, EditRequest]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    pairs = []
    for where, request in requests.items():
        if request.key in first:
            pairs.append((first[request.key], where))
        first.setdefault(request.key, where)
    return pairs


def _notes(requests: Mapping[str, EditRequest]) -> Iterator[str]:
    answered: dict[str, tuple[str, str]] = {}  # prompt -> its first answer, and where that is
    for where, request in requests.items():
        answer, first = answered.setdefault(request.text, (request.target_new, where))
        if answer != request.target_new:
            yield f"{where} wants another answer than {first} to the same prompt; of a batch or stream one holds"
        if request.target_new == request.target_true:
            yield f"{where} has the old answer as the new one; comparisons of the two are unscored"
        for name in ("prompt", "subject", "target_new", "target_true"):
            if found := invisible_characters(getattr(request, name) or ""):
                yield f"{where} has invisible characters in its {name}: {', '.join(found)}"
        if (num_words := _num_words(request.target_new)) > LONG_TARGET:
            yield (
                f"{where} has a target_new of {num_words} words; an editor optimizes all of them at every step, which "
                "takes long. Is it one answer?"
            )
    yield from _notes_on_places(requests)
    lacking = [where for where, request in requests.items() if request.subject is None]
    if lacking:
        yield (
            f"{len(lacking)} of {len(requests)} records have no subject (the first: {lacking[0]}); editors that need "
            "one leave them unscored, see lm-edit editors"
        )


def _notes_on_places(requests: Mapping[str, EditRequest]) -> Iterator[str]:
    """Notes on prompts whose end is not where the answer belongs."""
    blanks = {where: found[0] for where, request in requests.items() if (found := BLANK.search(request.text))}
    if blanks:
        where, blank = next(iter(blanks.items()))
        yield (
            f"{len(blanks)} of {len(requests)} prompts have a blank (the first: {blank!r} in {where}); an answer "
            "follows its prompt and fills no blank"
        )
    ended = [
        where
        for where, request in requests.items()
        if where not in blanks and request.separator is None and request.text.endswith(FULL_STOPS)
    ]
    if ended:
        yield (
            f"{len(ended)} of {len(requests)} prompts end with a full stop (the first: {ended[0]}); an answer "
            "continues its prompt, so end the prompt before the answer"
        )
