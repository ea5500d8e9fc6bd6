"""The lm-eval model class ``edited_hf``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edit_hooks.lm.model import EditedHFLM

__all__ = ["EditedHFLM"]


def __getattr__(name: str) -> type[EditedHFLM]:
    """Import the class on first use; importing a sibling must not load lm-eval."""
    if name != "EditedHFLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edit_hooks.lm.model import EditedHFLM

    return EditedHFLM
