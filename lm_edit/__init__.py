"""The `lm-edit` application: edits, statistics, tuning, saved results and figures outside of evaluations.

The names below read result files as data frames and cases; everything else is internal and can move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from lm_edit.results.answers.documents import CaseDocument, SavedQuestion, SavedResponse, load_documents
    from lm_edit.results.matrices import load_breakdown, load_retention
    from lm_edit.results.schema import SCHEMA_VERSION
    from lm_edit.results.tables import load_cases, load_results

_HOMES = {
    "SCHEMA_VERSION": "results.schema",
    "CaseDocument": "results.answers.documents",
    "SavedQuestion": "results.answers.documents",
    "SavedResponse": "results.answers.documents",
    "load_breakdown": "results.matrices",
    "load_cases": "results.tables",
    "load_documents": "results.answers.documents",
    "load_results": "results.tables",
    "load_retention": "results.matrices",
}

__all__ = [
    "SCHEMA_VERSION",
    "CaseDocument",
    "SavedQuestion",
    "SavedResponse",
    "load_breakdown",
    "load_cases",
    "load_documents",
    "load_results",
    "load_retention",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
