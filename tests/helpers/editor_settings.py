"""Settings under which editors are fast on tiny models: those of their contract."""

from __future__ import annotations

from typing import Any

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings


def settings_of(editor: str) -> dict[str, Any]:
    """The settings of an editor's contract."""
    return contract_settings(editor_class(editor))


ROME_CONFIG = settings_of("rome")
MEMIT_CONFIG = settings_of("memit")
ALPHAEDIT_CONFIG = settings_of("alphaedit")
EMMET_CONFIG = settings_of("emmet")
RECT_CONFIG = settings_of("rect")
PRUNE_CONFIG = settings_of("prune")
FT_CONFIG = settings_of("ft_m")
BIRD_CONFIG = settings_of("bird")
PMET_CONFIG = settings_of("pmet")
SIMIE_CONFIG = settings_of("simie")
ULTRAEDIT_CONFIG = settings_of("ultraedit")
LORA_CONFIG = settings_of("lora")
MEND_CONFIG = settings_of("mend")
