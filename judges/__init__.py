"""Judges: a verdict on an answer, by string comparison or by a language model."""

from __future__ import annotations

from judges.base import CORRECT, INCORRECT, LABELS, CoverageError, Item, Judge, Judgment, Report, Verdict
from judges.match import alias_match, any_exact_match, contains, exact_match, match_ratio, normalize

__all__ = [
    "CORRECT",
    "INCORRECT",
    "LABELS",
    "CoverageError",
    "Item",
    "Judge",
    "Judgment",
    "Report",
    "Verdict",
    "alias_match",
    "any_exact_match",
    "contains",
    "exact_match",
    "match_ratio",
    "normalize",
]
