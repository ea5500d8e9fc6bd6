"""Apply knowledge edits to a language model, ask questions under them, and undo them.

The Python API: an :class:`EditRequest` says what to change, :func:`load_editor` gives the method, its ``edit`` returns
:class:`Delta` values, and :func:`edited` applies them for the length of a ``with`` block.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edit_hooks.base import Editor, EditorConfig
    from edit_hooks.delta import Delta, Factor, PerRowAdapters, edited
    from edit_hooks.errors import EditingError
    from edit_hooks.registry import EDITORS, load_editor
    from edit_hooks.request import EditRequest

# Imported on first use: the command line must not wait for torch to show its help.
_HOMES = {
    "EDITORS": "registry",
    "Delta": "delta",
    "EditRequest": "request",
    "EditingError": "errors",
    "Editor": "base",
    "EditorConfig": "base",
    "Factor": "delta",
    "PerRowAdapters": "delta",
    "edited": "delta",
    "load_editor": "registry",
}

__all__ = [
    "EDITORS",
    "Delta",
    "EditRequest",
    "EditingError",
    "Editor",
    "EditorConfig",
    "Factor",
    "PerRowAdapters",
    "edited",
    "load_editor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
