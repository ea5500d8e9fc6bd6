"""Documents from one case each, and from all cases at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.documents import build_documents, of_all_cases
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.settings import Settings

CASES = [Case(EditRequest(prompt="Velm lies in", target_new=target, case_id=target)) for target in ("Karsk", "Sud")]


def test_a_builder_gets_one_case_or_all() -> None:
    def alone(case: Case, settings: Settings) -> dict[str, Any]:
        return {"case_id": case.request.case_id, **settings}

    @of_all_cases
    def together(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
        return ({"case_id": case.request.case_id, "of": len(cases), **settings} for case in cases)

    assert build_documents(alone, CASES, {"a": 1}) == [{"case_id": "Karsk", "a": 1}, {"case_id": "Sud", "a": 1}]
    assert [doc["of"] for doc in build_documents(together, CASES, {})] == [2, 2]
    assert together.__name__ == "together"  # named in the results
