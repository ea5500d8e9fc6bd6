"""Make knowledge edits of a language model, apply them, and restore the model.

The Python API: an :class:`EditRequest` describes the change, :func:`load_editor` returns an editor, its ``edit`` method
returns :class:`Delta` values, and :func:`edited` applies them for the duration of a ``with`` block.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edit_hooks.base.config import EditorConfig, config_field
    from edit_hooks.base.editor import EditJob, Editor
    from edit_hooks.base.registry import EDITORS, load_editor
    from edit_hooks.deltas.apply import edited
    from edit_hooks.deltas.delta import Delta, Factor
    from edit_hooks.deltas.row_adapters import PerRowAdapters
    from edit_hooks.request import EditRequest
    from edit_hooks.utils.errors import EditingError

# Imported on first use: ``lm-edit --help`` must not wait for torch.
_HOMES = {
    "EDITORS": "base.registry",
    "Delta": "deltas.delta",
    "EditJob": "base.editor",
    "EditRequest": "request",
    "EditingError": "utils.errors",
    "Editor": "base.editor",
    "EditorConfig": "base.config",
    "Factor": "deltas.delta",
    "PerRowAdapters": "deltas.row_adapters",
    "config_field": "base.config",
    "edited": "deltas.apply",
    "load_editor": "base.registry",
}

__all__ = [
    "EDITORS",
    "Delta",
    "EditJob",
    "EditRequest",
    "EditingError",
    "Editor",
    "EditorConfig",
    "Factor",
    "PerRowAdapters",
    "config_field",
    "edited",
    "load_editor",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
