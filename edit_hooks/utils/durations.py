"""Durations for messages."""

from __future__ import annotations


def spell_duration(seconds: float) -> str:
    """A duration in the unit that fits it: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
