"""Shipped editor configurations: one YAML per editor and model, found by the shape of the model, never by its name.

A file holds ``matches`` (values of the model's config that must all be equal), ``config`` (only what differs from the
editor's defaults) and ``source`` (where the values come from).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from edit_hooks.utils.yaml_io import read_yaml

FOLDER = Path(__file__).parents[1] / "configs"


@functools.cache
def shipped_files(folder: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Name and content of every configuration file of an editor's folder."""
    return tuple((path.stem, read_yaml(path)) for path in sorted((FOLDER / folder).glob("*.yaml")))


def shipped_config(folders: tuple[str, ...], config: Any) -> dict[str, Any]:
    """Settings shipped for a model, from the first folder that has a matching file; empty when none has."""
    for folder in folders:
        for _, content in shipped_files(folder):
            if all(getattr(config, key, None) == value for key, value in content["matches"].items()):
                return dict(content["config"])
    return {}
