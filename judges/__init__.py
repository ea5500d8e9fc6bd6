"""Judges: a verdict on an answer, by string comparison or by a language model."""

from __future__ import annotations

from typing import Any

from edit_hooks.utils.deprecation import warn_renamed
from judges.base import CORRECT, INCORRECT, LABELS, CoverageError, Item, Judge, Judged, Report, Verdict
from judges.match import alias_match, any_exact_match, contains, exact_match, match_ratio, normalize

__all__ = [
    "CORRECT",
    "INCORRECT",
    "LABELS",
    "CoverageError",
    "Item",
    "Judge",
    "Judged",
    "Report",
    "Verdict",
    "alias_match",
    "any_exact_match",
    "contains",
    "exact_match",
    "match_ratio",
    "normalize",
]

_RENAMED = {"normalise": "normalize"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed("the function", f"{__name__}.{name}", f"{__name__}.{_RENAMED[name]}")
    return globals()[_RENAMED[name]]
