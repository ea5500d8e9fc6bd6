"""Options of exports, and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Which results are exported, and facts that result files do not have.

    Attributes:
        only: conditions ``field=value``, see :func:`lm_edit.results.filters.filter_rows`.
        organization: who ran the evaluations, for every-eval-ever.
        developer: who made the models whose names do not say so, for every-eval-ever.
        source_url: where the results are published, for Hugging Face.
    """

    only: Sequence[str] = ()
    organization: str = "unknown"
    developer: str | None = None
    source_url: str | None = None


@dataclass
class ExportResult:
    """The files that an export wrote, and what it left out: reason -> number of results."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        """Count one result that the format cannot hold."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
