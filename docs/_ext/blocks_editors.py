"""Blocks on editors: the table of all, the settings of one."""

from __future__ import annotations

from collections.abc import Callable

from block import Block, definition, table

from edit_hooks.base.describe import EditorDescription, describe_editor
from edit_hooks.base.registry import CORE, EDITORS, MORE

TIERS = {"core": ("Core", CORE), "more": ("More", MORE)}


def editor_table(wanted: str) -> Block:
    """Editors of a tier (``core``, ``more``), in the registry's order."""
    rows = [_row(describe_editor(name)) for name in TIERS[wanted][1]]
    return Block(table(["editor", "", "writes", "batch", "subject"], rows))


def _row(editor: EditorDescription) -> list[str]:
    joint = "as its base" if editor.has_base else ("yes" if editor.supports_joint else "no")
    subject = "as its base" if editor.has_base else ("needed" if editor.needs_subject else "-")
    return [f"`{editor.name}`", editor.summary, ", ".join(editor.writes), joint, subject]


def editor_settings(name: str) -> Block:
    """Settings of an editor with their defaults."""
    entries = []
    for setting in describe_editor(name).settings:
        default = "required" if setting.default == "required" else f"= {setting.default}"
        entries.append(definition(f"`{setting.name}` `{default}`", setting.help or "-", f"*{setting.kind}*"))
    return Block("\n\n".join(entries))


EDITOR_BLOCKS: dict[str, Callable[[str], Block]] = {"editors": editor_table, "settings": editor_settings}
__all__ = ["EDITORS", "EDITOR_BLOCKS"]
