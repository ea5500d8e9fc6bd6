"""Documents of a task: one per case, from the case alone or with a view of all cases of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.settings import Settings

CaseT = TypeVar("CaseT", bound=Case)
# (all cases, settings) -> one document per case, in their order
AllDocuments = Callable[[Sequence[CaseT], Settings], Iterable[Mapping[str, Any]]]

_SEES_ALL = "sees_all_cases"


def of_all_cases(builder: AllDocuments[CaseT]) -> AllDocuments[CaseT]:
    """Mark a ``process_docs`` that gets all cases at once, since its questions use texts of other records."""
    setattr(builder, _SEES_ALL, True)
    return builder


def build_documents(builder: Callable[..., Any], cases: Sequence[Case], settings: Settings) -> list[dict[str, Any]]:
    """The documents of all cases.

    Args:
        builder: ``process_docs`` of a task: ``(case, settings) -> document``, or one marked with :func:`of_all_cases`.
    """
    if getattr(builder, _SEES_ALL, False):
        return [dict(doc) for doc in builder(cases, settings)]
    return [builder(case, settings) for case in cases]
