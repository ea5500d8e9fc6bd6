"""Settings of an editor by name, in its resolved settings as results have them.

An editor that post-processes another one (``rect``, ``prune``, ``revive``, ``simie``) has the other's settings in
``base_settings``, and an editor with a context on top (``icl``) has those of both in ``base_settings`` and
``context_settings``. A setting is therefore looked up in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INNER = ("base_settings", "context_settings")


def find_setting(config: object, name: str) -> Any:
    """The value of a setting, ``None`` where no editor has it; the outermost editor that has it counts.

    Args:
        config: resolved settings; anything but a mapping has none.
    """
    if not isinstance(config, Mapping):
        return None
    if name in config:
        return config[name]
    found = (find_setting(config.get(inner), name) for inner in INNER)
    return next((value for value in found if value is not None), None)


def as_given(config: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what was given for those that an editor drew, as ``context_templates: sampled_6``.

    Args:
        drawn: setting -> what was given, and the same of inner editors.
    """
    inner = {
        name: as_given(config.get(name) or {}, drawn[name]) for name in INNER if isinstance(drawn.get(name), Mapping)
    }
    return {**config, **drawn, **inner}


def without_setting(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings without this one, which is left out of the inner editors' as well."""
    return {
        key: without_setting(value, name) if key in INNER and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != name
    }
