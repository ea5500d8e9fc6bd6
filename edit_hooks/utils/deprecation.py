"""Old names that still work, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def warn_renamed(what: str, old: str, new: str) -> None:
    """Warn that ``old`` is now called ``new``; shown to users by default, unlike a DeprecationWarning."""
    warnings.warn(f"{what} {old!r} is now called {new!r}; the old name will be removed.", FutureWarning, stacklevel=3)


def with_current_names(mapping: Mapping[str, Any], renamed: Mapping[str, str], what: str) -> dict[str, Any]:
    """The mapping with renamed keys under their current names; warns about each old one.

    Args:
        renamed: old name -> current name. An old name beside its current one is left for the caller to refuse.
    """
    current: dict[str, Any] = {}
    for key, value in mapping.items():
        new = renamed.get(key, key)
        if new != key and new not in mapping:
            warn_renamed(what, key, new)
            key = new
        current[key] = value
    return current
