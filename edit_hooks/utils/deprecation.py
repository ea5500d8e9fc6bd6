"""Warnings for old names that still work."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def warn_renamed(what: str, old: str, new: str) -> None:
    """Warn that ``old`` is now called ``new``."""
    # Python hides a DeprecationWarning from users by default.
    warnings.warn(f"{what} {old!r} is now called {new!r}; the old name will be removed.", FutureWarning, stacklevel=3)


def with_current_names(mapping: Mapping[str, Any], renamed: Mapping[str, str], what: str) -> dict[str, Any]:
    """Replace renamed keys by their current names, with a warning for each.

    Args:
        renamed: old name -> current name. If both are present, the old one stays and the caller reports it as unknown.
    """
    current: dict[str, Any] = {}
    for key, value in mapping.items():
        new = renamed.get(key, key)
        if new != key and new not in mapping:
            warn_renamed(what, key, new)
            key = new
        current[key] = value
    return current
