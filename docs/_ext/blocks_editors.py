"""Blocks on editors: the table of all, and what the page of one holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml
from block import ROOT, Block, definition, table
from blocks_measured import seconds_of

from edit_hooks.base.config import EditorConfig
from edit_hooks.base.describe import EditorDescription, EditorSetting, describe_editor, describe_settings
from edit_hooks.base.registry import CORE, EDITORS, MORE, editor_class
from edit_hooks.base.shipped import shipped_files
from edit_hooks.training.find import trainer_class

TIERS = {"core": CORE, "more": MORE}
FACTS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docs/_data/editors.yaml").read_text(encoding="utf-8"))


def editor_table(wanted: str) -> Block:
    """Editors of a tier (``core``, ``more``), in the registry's order."""
    rows = []
    for name in TIERS[wanted]:
        editor, facts = describe_editor(name), FACTS[name]
        changes = f"{', '.join(editor.writes)}: {facts['writes']}"
        seconds = seconds_of(name)
        rows.append([f"[`{name}`](docs/editors/{name}.md)", editor.summary, changes, *_modes(editor), seconds])
    return Block(table(["editor", "", "changes", "batch", "subject", "s per edit"], rows))


def _modes(editor: EditorDescription) -> tuple[str, str]:
    if editor.has_base:
        return "as its base", "as its base"
    return "yes" if editor.supports_joint else "no", "needed" if editor.needs_subject else "-"


def head(name: str) -> Block:
    """The line below the title of an editor's page."""
    editor, facts = describe_editor(name), FACTS[name]
    joint, subject = _modes(editor)
    changes = facts["writes"].replace("as `", "as of `")
    parts = [
        f"**`{name}`**",
        f"tier *{editor.tier}*",
        f"changes {', '.join(editor.writes)} ({changes})" if changes not in editor.writes else f"changes {changes}",
        f"batches: {joint}",
        "streams: yes",
        f"subject: {'not needed' if subject == '-' else subject}",
    ]
    if (seconds := seconds_of(name)) != "-":
        parts.append(f"{seconds} s per edit of the demo model on two CPU cores")
    return Block(" · ".join(parts))


def settings(name: str) -> Block:
    """Settings of an editor with their defaults; those of its training behind them, if it is trained."""
    described = describe_editor(name).settings
    return Block(_definitions(described))


def training_settings(name: str) -> Block:
    """Settings of the training of an editor, beside those of the editor."""
    own = {setting.name for setting in describe_editor(name).settings}
    config: type[EditorConfig] = trainer_class(editor_class(name)).config_class
    return Block(_definitions([setting for setting in describe_settings(config) if setting.name not in own]))


def _definitions(found: Any) -> str:
    return "\n\n".join(map(_definition, found))


def _definition(setting: EditorSetting) -> str:
    default = "required" if setting.default == "required" else f"= {setting.default}"
    return definition(f"`{setting.name}` `{default}`", setting.help or "-", f"`{setting.kind}`")


def shipped(name: str) -> Block:
    """Settings shipped for models: the file, the values that differ from the defaults, their source."""
    entries = []
    for folder in editor_class(name).config_folders:
        for stem, content in shipped_files(folder):
            values = [f"`{key}: {_value(value)}`" for key, value in content["config"].items()]
            values += [f"training `{key}: {_value(value)}`" for key, value in content.get("training", {}).items()]
            entries.append(definition(f"`{folder}/{stem}`", content["source"], ", ".join(values) or "the defaults"))
    return Block(
        "\n\n".join(entries) or "No file is shipped: every model gets the defaults, with blocks chosen by depth."
    )


def _value(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."


def sources(name: str) -> Block:
    """Parity of an editor, and its papers."""
    facts = FACTS[name]
    papers = []
    for paper in facts["papers"]:
        number = paper.get("arxiv")
        link = f", [arXiv:{number}](https://arxiv.org/abs/{number})" if number else ""
        papers.append(f"- *{paper['title']}*{link}")
    parity = facts["parity"][0].upper() + facts["parity"][1:]
    about = "[What equals which release](docs/explain/fidelity.md) explains the bounds."
    listed = ["", "## Paper" + "s" * (len(papers) > 1), "", *papers] if papers else []
    return Block("\n".join([f"{parity}. {about}", *listed]))


def parity_table(_: str) -> Block:
    """Parity of all editors."""
    rows = [[f"[`{name}`](docs/editors/{name}.md)", FACTS[name]["parity"]] for name in EDITORS]
    return Block(table(["editor", "checked against"], rows))


EDITOR_BLOCKS: dict[str, Callable[[str], Block]] = {
    "editors": editor_table,
    "editor-head": head,
    "settings": settings,
    "training-settings": training_settings,
    "shipped": shipped,
    "parity": sources,
    "parity-table": parity_table,
}
