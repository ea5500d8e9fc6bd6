"""R-ROME, the same thing as C-ROME: ROME with consistent keys ("Understanding the Collapse of LLMs in Model Editing").

The template-mean key is used in the direction and in the denominator, and the template-mean output is subtracted, so
that the edited matrix maps the mean key exactly to v*. One implementation with ROME: only the key mode differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from edit_hooks.base.config import config_field
from edit_hooks.editors.rome import ROME, KeyMode, ROMEConfig


@dataclass(kw_only=True)
class RROMEConfig(ROMEConfig):
    """ROME's settings with consistent keys by default."""

    key_mode: KeyMode = config_field("which keys are used where, see the table in editors/rome.py", default="prefixed")


class RROME(ROME):
    """ROME with the mean key over the context templates in both places."""

    name = "r_rome"
    config_class = RROMEConfig
    config_folders = ("r_rome", "rome")
