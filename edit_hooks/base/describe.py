"""Capabilities and settings of all editors as data."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass
from typing import Any

from edit_hooks.base.config import EditorConfig
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.registry import EDITORS, editor_class, editor_names, tier
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class EditorSetting:
    """One setting of an editor: name, type, default as text, one line of help."""

    name: str
    kind: str
    default: str
    help: str


@dataclass(frozen=True)
class EditorDescription:
    """One row of the editor table.

    Attributes:
        tier: ``core``, ``more`` or ``installed``.
        summary: first line of the class's docstring.
        needs_subject: requests must mark the subject.
        supports_joint: several requests can be written at once (``mode=batch``, ``edit_batch_size`` above 1).
            Both are of the class: an editor with a base (``has_base``) has those of its base.
        writes: parts that the edits change: weights, hooks, context.
        has_base: it post-processes the edits of another editor.
        stream_growth: what a stream carries, if the class states it.
    """

    name: str
    tier: str
    summary: str
    needs_subject: bool
    supports_joint: bool
    writes: tuple[str, ...]
    settings: tuple[EditorSetting, ...]
    has_base: bool
    stream_growth: StreamGrowth | None


def describe_editor(name: str) -> EditorDescription:
    """Describe one editor.

    Raises:
        EditingError: for an unknown name, or a class that cannot be imported.
    """
    editor = editor_class(name)
    text = inspect.cleandoc(editor.__doc__ or "")  # its own: that of a base would describe another editor
    summary = re.sub(r":\w+:`~?([^`]*)`", r"\1", text.split("\n")[0]) or "(its class has no docstring)"
    return EditorDescription(
        name,
        tier(name),
        summary,
        editor.needs_subject,
        editor.supports_joint,
        editor.writes,
        describe_settings(editor.config_class),
        has_base=issubclass(editor, PostProcessingEditor),
        stream_growth=editor.stream_growth,
    )


def describe_settings(config_class: type[EditorConfig]) -> tuple[EditorSetting, ...]:
    """Describe the settings of a configuration, in its order."""
    hints = typing.get_type_hints(config_class)
    return tuple(
        EditorSetting(field.name, _kind(hints[field.name]), _default(field), str(field.metadata.get("help", "")))
        for field in dataclasses.fields(config_class)
    )


def describe_editors() -> list[EditorDescription]:
    """Describe all editors; those of other packages come last.

    An editor of another package that cannot be imported is left out with a warning.
    """
    rows = [describe_editor(name) for name in EDITORS]
    for name in editor_names()[len(EDITORS) :]:
        try:
            rows.append(describe_editor(name))
        except EditingError as error:
            log.warning("%s", error)
    return rows


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def _kind(hint: Any) -> str:
    """Format an annotation: ``int | None``, ``'fast' or 'reference'``."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(repr(option) for option in typing.get_args(hint))
    if hint is Any:
        return "any"
    if hint is type(None):
        return "None"
    if typing.get_args(hint) and typing.get_origin(hint) not in (list, dict, tuple):
        return " | ".join(_kind(option) for option in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
