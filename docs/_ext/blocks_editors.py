"""Blocks on editors: the table of all, and what the page of one holds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from block import ROOT, Block, definition, table

sys.path.append(str(ROOT / "scripts"))
import findings
from _measurements import COLUMNS, UNEDITED, Finished
from editors_table import TITLES, format_cell, render, summarize
from measure_editors import PLAN, load_rows, load_titles

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
        seconds = _seconds(name)
        rows.append([f"[`{name}`](docs/editors/{name}.md)", editor.summary, changes, *_modes(editor), seconds])
    return Block(table(["editor", "", "changes", "batch", "subject", "s per edit"], rows))


def _modes(editor: EditorDescription) -> tuple[str, str]:
    if editor.has_base:
        return "as its base", "as its base"
    return "yes" if editor.supports_joint else "no", "needed" if editor.needs_subject else "-"


def _seconds(name: str) -> str:
    found = [row["seconds_per_edit"] for row in _summaries() if row["editor"] == name and "seconds_per_edit" in row]
    return f"{found[-1]:.1f}" if found else "-"


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
    if (seconds := _seconds(name)) != "-":
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


@functools.cache
def _summaries() -> list[dict[str, Any]]:
    return summarize(load_rows(PLAN, {}), Finished.read(None))


def measured(name: str) -> Block:
    """Rows of an editor in the tables of measured editors, with the unedited model's."""
    titles = load_titles(PLAN)
    ours = [row for row in _summaries() if row["editor"] == name]
    unedited = next(row for row in _summaries() if row["editor"] == UNEDITED)
    if not ours:
        return Block("Not measured on the demo model.")
    blocks = []
    for part, columns in COLUMNS.items():
        shown = [(titles[row["group"]], row) for row in ours if part in row["parts"]]
        if not shown:
            continue
        headings = [heading for heading, _, _ in columns]
        basis = unedited["parts"][part]["cells"]
        rows = [["unedited model", *_cells(unedited, part, headings, basis)]]
        rows += [[title, *_cells(row, part, headings, basis)] for title, row in shown]
        blocks += [f"{TITLES[part]}:", table(["settings", *headings, "seeds"], rows)]
    return Block("\n\n".join(blocks))


def _cells(row: dict[str, Any], part: str, headings: list[str], basis: dict[str, Any]) -> Iterator[str]:
    found = row["parts"][part]
    for heading in headings:
        yield format_cell(found["cells"].get(heading), basis.get(heading))
    yield found["seeds"]


def measured_tables(_: str) -> Block:
    """All tables of measured editors."""
    return Block(render(load_rows(PLAN, {}), load_titles(PLAN), Finished.read(None)))


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


def finding(name: str) -> Block:
    """The tables of a finding."""
    return Block(findings.tables(name))


EDITOR_BLOCKS: dict[str, Callable[[str], Block]] = {
    "editors": editor_table,
    "editor-head": head,
    "settings": settings,
    "training-settings": training_settings,
    "shipped": shipped,
    "measured": measured,
    "measured-editors": measured_tables,
    "parity": sources,
    "finding": finding,
    "parity-table": parity_table,
}
