"""The facts that a passport asks about: the edit's own requests, with the questions of a file or benchmark.

All facts of the source are written into one file of own facts (docs/guides/own-facts.md), so that questions that draw
objects of other records find some; those of the edit are chosen by their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edit_hooks.lm.options.edit_sources import read_requests
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import names_file, user_path, write_atomically
from edit_hooks.utils.storage.json_io import json_text
from lm_eval_tasks.common.records.benchmark import OWN_FACTS, find_benchmark, load_cases
from lm_eval_tasks.common.records.cases import Case


@dataclass(frozen=True, kw_only=True)
class EditFacts:
    """Facts, and which of them are the edit's.

    Attributes:
        cases: all facts of the source.
        chosen: numbers of those that the edit has.
        origin: where they were read (JSON-able).
        benchmark: whose records they are; "" for the edit's own requests.
        settings: of tasks of that benchmark.
        not_found: requests of the edit that the source lacks.
    """

    cases: Sequence[Case]
    chosen: Sequence[int]
    origin: Mapping[str, Any]
    benchmark: str = ""
    settings: Mapping[str, Any]
    not_found: int = 0

    @property
    def requests(self) -> list[EditRequest]:
        """The first edit of each chosen fact."""
        return [self.cases[number].request for number in self.chosen]

    def describe(self) -> dict[str, Any]:
        """Origin and counts, for the JSON."""
        return {
            **self.origin,
            "benchmark": self.benchmark or None,
            "facts": len(self.cases),
            "asked": len(self.chosen),
            "requests_not_in_source": self.not_found,
        }

    def write(self, path: Path) -> None:
        """Write all facts in the layout of own facts."""
        lines = [json_text(_own_record(case)) for case in self.cases]
        write_atomically(path, "\n".join(lines) + "\n")


def read_facts(
    saved: Mapping[str, EditRequest] | None, source: str | None, settings: Mapping[str, Any], limit: int
) -> EditFacts:
    """The facts of an edit.

    Args:
        saved: the edit's requests by their keys; ``None`` if it does not list them.
        source: a benchmark, or a file of facts or of edit requests; ``None`` for the requests alone.
        settings: of the records of a benchmark.
        limit: the largest number of facts to ask about, the first ones.

    Raises:
        EditingError: for an edit without requests and no source, for a source without any fact of the edit, and for
            records that cannot be read.
    """
    if source is None:
        if not saved:
            raise EditingError(
                "the edit does not list what it edits, as an adapter from elsewhere; name a file of its facts: --facts."
            )
        cases = [Case(request) for request in saved.values()]
        return _limited(
            EditFacts(cases=cases, chosen=range(len(cases)), origin={"source": "the edit"}, settings={}), limit
        )
    facts = _read_source(source, settings)
    if saved is None:
        return _limited(facts, limit)
    return _limited(_of_edit(facts, saved, source), limit)


def _limited(facts: EditFacts, limit: int) -> EditFacts:
    return replace(facts, chosen=list(facts.chosen)[:limit])


def _read_source(source: str, settings: Mapping[str, Any]) -> EditFacts:
    if (rows := read_requests(source)) is not None:
        cases = [Case(EditRequest.from_dict(row, where=where)) for where, row in rows]
        name = user_path(source, "file of facts").name
        return EditFacts(cases=cases, chosen=range(len(cases)), origin={"source": name}, settings={})
    loaded = load_cases(source, settings)
    is_file = names_file(source)
    origin: dict[str, Any] = {"source": user_path(source, "file of facts").name if is_file else source}
    told = ("sha256", "revision") if is_file else ("data", "sha256", "revision")  # `data` of a file is a path
    origin |= {name: loaded.source[name] for name in told if name in loaded.source}
    return EditFacts(
        cases=loaded.records,
        chosen=range(len(loaded.records)),
        origin=origin,
        benchmark=str(loaded.source.get("benchmark", OWN_FACTS)) if is_file else find_benchmark(source).name,
        settings={"data": source} if is_file else dict(settings),
    )


def _of_edit(facts: EditFacts, saved: Mapping[str, EditRequest], source: str) -> EditFacts:
    """The facts whose requests are all in the edit, as edited: other fields than texts may differ in the file."""
    edited = {_texts(request): request for request in saved.values()}
    cases, chosen, found = list(facts.cases), [], set()
    for number, case in enumerate(facts.cases):
        texts = [_texts(request) for request in case.requests]
        if all(text in edited for text in texts):
            cases[number] = replace(case, request=edited[texts[0]].without_context)
            chosen.append(number)
            found.update(texts)
    if not chosen:
        raise EditingError(
            f"--facts {source} has none of the edit's {len(saved)} facts; name the file or benchmark that they are of."
        )
    return replace(facts, cases=cases, chosen=chosen, not_found=len(edited.keys() - found))


def _texts(request: EditRequest) -> tuple[str, str]:
    """What makes two requests the same edit for a reader: the prompt and the new answer."""
    return request.bare_text, request.target_new


def _own_record(case: Case) -> dict[str, Any]:
    """A fact in the layout of own facts, with the request as it was edited."""
    request = case.request
    record = {
        "case_id": request.case_id,
        "prompt": request.prompt,
        "subject": request.subject,
        "target_new": request.target_new,
        "ground_truth": request.target_true,
        "relation_id": request.relation_id,
        "separator": request.separator,
        "rephrase_prompt": [question.prompt for question in case.paraphrases],
        "locality_prompt": [question.prompt for question in case.neighbors],
        "locality_ground_truth": [question.wanted for question in case.neighbors],
    }
    return {name: value for name, value in record.items() if value not in (None, [])}
