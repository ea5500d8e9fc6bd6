"""EVK-Edit: AlphaEdit with EVK-Align.

Method of "Beyond Local Edits: Embedding-Virtualized Knowledge ...".

The value optimization has one more term, the divergence on prompts with perturbed embeddings
(:mod:`edit_hooks.locate.values.evk_align`); everything else is AlphaEdit. ``evk_align: true`` adds the same term to
every other locate-then-edit editor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edit_hooks.base.config import Settings, config_field
from edit_hooks.editors.alphaedit import AlphaEdit, AlphaEditConfig


@dataclass(kw_only=True)
class EVKEditConfig(AlphaEditConfig):
    """AlphaEdit's settings with EVK-Align on."""

    evk_align: bool = config_field("preserve the predictions for perturbed prompts (EVK-Align)", default=True)


class EVKEdit(AlphaEdit):
    """AlphaEdit whose targets preserve the predictions for perturbed prompts."""

    name = "evk_edit"
    config_class = EVKEditConfig
    config_folders = ("evk_edit", "alphaedit")
    writes_states = False
    # Random models answer all prompts nearly alike, so more noise is needed than the default.
    contract_settings: ClassVar[Settings] = {**AlphaEdit.contract_settings, "evk_relative_sigma": 2.0}
