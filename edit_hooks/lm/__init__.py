"""The lm-eval model class ``edited_hf``, imported on first use: a sibling's import must not load lm-eval."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from edit_hooks.lm.model import EditedHFLM

_HOMES = {
    "EditedHFLM": "model",
}

__all__ = [
    "EditedHFLM",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
