"""R-ROME, also published as C-ROME: ROME with consistent keys.

"Rebuilding ROME: Resolving Model Collapse during Sequential Model Editing" and "Understanding the Collapse of LLMs in
Model Editing". The mean key over the context templates is used in the direction and in the denominator, and the mean
output is subtracted, so the edited matrix maps the mean key exactly to v*. The code is ROME's; only the default of
``key_mode`` differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from edit_hooks.base.config import config_field
from edit_hooks.editors.rome import ROME, KeyMode, ROMEConfig


@dataclass(kw_only=True)
class RROMEConfig(ROMEConfig):
    """ROME's settings with consistent keys by default."""

    key_mode: KeyMode = config_field(
        "keys of the update, as for rome; prefixed: the mean over templates throughout", default="prefixed"
    )


class RROME(ROME):
    """ROME with the mean key over the context templates throughout."""

    name = "r_rome"
    config_class = RROMEConfig
    config_folders = ("r_rome", "rome")
