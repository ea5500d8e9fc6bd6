"""``editor_args=auto``: settings that a package above this one finds for the model.

It registers a function as the entry point ``auto`` of the group :data:`ENTRY_POINTS`, with the parameters and the
result of :func:`lm_edit.tuning.auto.auto_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edit_hooks.run_options import default_of
from edit_hooks.store.store import Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.plugins import import_object, registered

AUTO = "auto"
ENTRY_POINTS = "lm_eval_editing.settings"


def found_settings(pretrained: object, loading: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """The settings for the editor and the model of some options.

    Args:
        loading: options of lm-eval's Hugging Face class. own: those of the model class.

    Raises:
        EditingError: no package finds settings, and as the function that does.
    """
    find = registered(ENTRY_POINTS).get(AUTO)
    if find is None:
        raise EditingError("editor_args=auto needs the package lm_edit, whose entry points are not installed.")
    store = own.get("store", default_of("store"))
    shared = {name: own[name] for name in ("family",) if name in own}
    settings: Mapping[str, Any] | str = import_object(find.value, "settings")(
        pretrained,
        {**loading, **shared},
        str(own.get("editor", default_of("editor"))),
        int(own.get("seed", default_of("seed"))),
        None if store == "off" else Store(store),
        str(own.get("edit_context", default_of("edit_context"))),
    )
    return settings
