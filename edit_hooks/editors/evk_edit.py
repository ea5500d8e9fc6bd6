"""EVK-Edit: AlphaEdit with EVK-Align ("Beyond Local Edits: Embedding-Virtualized Knowledge ...").

The targets are optimized with the divergence on perturbed prompts as one more term
(:mod:`edit_hooks.locate.evk_align`), everything else is AlphaEdit.
The same term goes with every other locate-then-edit editor: ``evk_align: true``.
"""

from __future__ import annotations

from dataclasses import dataclass

from edit_hooks.base.config import config_field
from edit_hooks.editors.alphaedit import AlphaEdit, AlphaEditConfig


@dataclass(kw_only=True)
class EVKEditConfig(AlphaEditConfig):
    """AlphaEdit's settings with EVK-Align on."""

    evk_align: bool = config_field("keep the answers to perturbed versions of the prompt (EVK-Align)", default=True)


class EVKEdit(AlphaEdit):
    """AlphaEdit whose targets keep the answers to perturbed prompts."""

    name = "evk_edit"
    config_class = EVKEditConfig
    config_folders = ("evk_edit", "alphaedit")
