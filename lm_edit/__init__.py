"""The `lm-edit` application: edits, statistics, tuning, saved results and figures outside of evaluations.

The names below read result files as data frames and cases; everything else is internal and can move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from lm_edit.results import (
        SCHEMA_VERSION,
        CaseDocument,
        Question,
        SavedResponse,
        load_breakdown,
        load_cases,
        load_documents,
        load_results,
        load_retention,
    )

_HOMES = {
    "SCHEMA_VERSION": "results",
    "CaseDocument": "results",
    "Question": "results",
    "SavedResponse": "results",
    "load_breakdown": "results",
    "load_cases": "results",
    "load_documents": "results",
    "load_results": "results",
    "load_retention": "results",
}

__all__ = [
    "SCHEMA_VERSION",
    "CaseDocument",
    "Question",
    "SavedResponse",
    "load_breakdown",
    "load_cases",
    "load_documents",
    "load_results",
    "load_retention",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
