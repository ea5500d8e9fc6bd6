"""Settings under which editors are fast on tiny models: those of their contract."""

from __future__ import annotations

from typing import Any

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings


def _settings(editor: str) -> dict[str, Any]:
    return contract_settings(editor_class(editor))


ROME_CONFIG = _settings("rome")
MEMIT_CONFIG = _settings("memit")
ALPHAEDIT_CONFIG = _settings("alphaedit")
EMMET_CONFIG = _settings("emmet")
RECT_CONFIG = _settings("rect")
PRUNE_CONFIG = _settings("prune")
FT_CONFIG = _settings("ft_m")
BIRD_CONFIG = _settings("bird")
PMET_CONFIG = _settings("pmet")
SIMIE_CONFIG = _settings("simie")
ULTRAEDIT_CONFIG = _settings("ultraedit")
LORA_CONFIG = _settings("lora")
MEND_CONFIG = _settings("mend")
