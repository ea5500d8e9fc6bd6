"""The table of editors: name -> ``module:class``. Adding an editor is one row here and one file in ``editors/``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.base.editor import Editor
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.yaml_io import read_yaml

EDITORS: dict[str, str] = {
    "rome": "edit_hooks.editors.rome:ROME",
    "r_rome": "edit_hooks.editors.r_rome:RROME",
    "memit": "edit_hooks.editors.memit:MEMIT",
    "alphaedit": "edit_hooks.editors.alphaedit:AlphaEdit",
    "evk_edit": "edit_hooks.editors.evk_edit:EVKEdit",
    "bird": "edit_hooks.editors.bird:BIRD",
    "emmet": "edit_hooks.editors.emmet:EMMET",
    "pmet": "edit_hooks.editors.pmet:PMET",
    "rect": "edit_hooks.editors.rect:RECT",
    "prune": "edit_hooks.editors.prune:PRUNE",
    "ultraedit": "edit_hooks.editors.ultraedit:UltraEdit",
    "simie": "edit_hooks.editors.simie:SimIE",
    "ft_m": "edit_hooks.editors.ft_m:FTM",
    "grace": "edit_hooks.editors.grace:GRACE",
    "wise": "edit_hooks.editors.wise:WISE",
    "melo": "edit_hooks.editors.melo:MELO",
    "ice": "edit_hooks.editors.ike:ICE",
    "ike": "edit_hooks.editors.ike:IKE",
    "ike_leaky_pool": "edit_hooks.editors.ike:IKELeakyPool",
    "ft_l": "edit_hooks.editors.ft_l:FTL",
    "kn": "edit_hooks.editors.kn:KN",
    "lora": "edit_hooks.editors.lora:LoRA",
    "mend": "edit_hooks.editors.mend:MEND",
}


def editor_class(name: str) -> type[Editor]:
    """The class behind an editor's name.

    Raises:
        EditingError: for an unknown name, with near misses and the list of known ones.
    """
    if name not in EDITORS:
        raise EditingError(f"unknown editor {name!r}.{near_misses(name, EDITORS)} Known: {', '.join(sorted(EDITORS))}.")
    module, _, attribute = EDITORS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_editor(name: str, config: Mapping[str, Any] | str | Path | None = None) -> Editor:
    """An editor by name, with settings that override the shipped ones.

    Args:
        config: a mapping, or the path of a YAML file with one; unknown keys are errors.
    """
    if isinstance(config, (str, Path)):
        config = read_yaml(config)
    return editor_class(name)(config)
