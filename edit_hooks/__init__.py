"""Make knowledge edits of a language model, apply them, and restore the model.

The Python API: an :class:`EditRequest` describes the change, :func:`load_editor` returns an editor, its ``edit`` method
returns :class:`Delta` values, and :func:`edited` applies them for the duration of a ``with`` block.

The further names are for authors of editors: the modules of a model that an edit can change, hooks, and edits that act
through hooks or the prompt. Everything else is internal and can move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from edit_hooks.base.artifacts.trained_artifact import ArtifactKind
    from edit_hooks.base.config import EditorConfig, config_field
    from edit_hooks.base.editor import Editor
    from edit_hooks.base.footprint import StreamGrowth
    from edit_hooks.base.job import EditJob
    from edit_hooks.base.registry import EDITORS, load_editor
    from edit_hooks.deltas.apply import edited
    from edit_hooks.deltas.context_edit import ContextEdit
    from edit_hooks.deltas.delta import Delta, Factor
    from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_width, target_module
    from edit_hooks.deltas.row_adapters import PerRowAdapters
    from edit_hooks.modeling.architectures import architecture_of, input_device, map_shape
    from edit_hooks.modeling.fingerprint.base_model import compare_models
    from edit_hooks.modeling.fingerprint.identity import model_identity
    from edit_hooks.modeling.hooks import Registration, frozen, hooks
    from edit_hooks.modeling.tokens import split_continuation
    from edit_hooks.request import EditRequest
    from edit_hooks.utils.errors import EditingError
    from edit_hooks.utils.settings.numbers import POSITIVE

_HOMES = {
    "EDITORS": "base.registry",
    "POSITIVE": "utils.settings.numbers",
    "ArtifactKind": "base.artifacts.trained_artifact",
    "ContextEdit": "deltas.context_edit",
    "Delta": "deltas.delta",
    "EditJob": "base.job",
    "EditRequest": "request",
    "EditingError": "utils.errors",
    "Editor": "base.editor",
    "EditorConfig": "base.config",
    "Factor": "deltas.delta",
    "HookEdit": "deltas.hook_edit",
    "HookKind": "deltas.hook_edit",
    "PerRowAdapters": "deltas.row_adapters",
    "Registration": "modeling.hooks",
    "StreamGrowth": "base.footprint",
    "architecture_of": "modeling.architectures",
    "check_width": "deltas.hook_edit",
    "compare_models": "modeling.fingerprint.base_model",
    "config_field": "base.config",
    "edited": "deltas.apply",
    "frozen": "modeling.hooks",
    "hooks": "modeling.hooks",
    "input_device": "modeling.architectures",
    "load_editor": "base.registry",
    "map_shape": "modeling.architectures",
    "model_identity": "modeling.fingerprint.identity",
    "split_continuation": "modeling.tokens",
    "target_module": "deltas.hook_edit",
}

__all__ = [
    "EDITORS",
    "POSITIVE",
    "ArtifactKind",
    "ContextEdit",
    "Delta",
    "EditJob",
    "EditRequest",
    "EditingError",
    "Editor",
    "EditorConfig",
    "Factor",
    "HookEdit",
    "HookKind",
    "PerRowAdapters",
    "Registration",
    "StreamGrowth",
    "architecture_of",
    "check_width",
    "compare_models",
    "config_field",
    "edited",
    "frozen",
    "hooks",
    "input_device",
    "load_editor",
    "map_shape",
    "model_identity",
    "split_continuation",
    "target_module",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
