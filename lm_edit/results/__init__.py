"""Results of lm-eval as data: tables, cases, checks and exports; and judging saved answers again."""

from lm_edit.results.documents import CaseDocument, Question, SavedResponse, load_documents
from lm_edit.results.matrices import load_breakdown, load_retention
from lm_edit.results.schema import SCHEMA_VERSION
from lm_edit.results.tables import load_cases, load_results

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
