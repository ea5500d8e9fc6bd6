"""Options of exports, and what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Facts that result files do not have.

    Attributes:
        organization: who ran the evaluations, for every-eval-ever.
        developer: who made the models whose names do not say so, for every-eval-ever.
        source_url: where the results are published, for Hugging Face.
    """

    organization: str = "unknown"
    developer: str | None = None
    source_url: str | None = None


@dataclass
class Exported:
    """The files that an export wrote, and what it left out: reason -> number of results."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        """Count one result that the format cannot hold."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
