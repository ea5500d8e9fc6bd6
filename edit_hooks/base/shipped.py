"""Shipped editor configurations: one YAML file per editor and model.

A file is selected by the shape of the model, never by its name. It holds ``matches`` (values of the model's config that
must all be equal), ``config`` (settings that differ from the editor's defaults) and ``source`` (origin of the values).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.yaml_io import read_yaml

FOLDER = Path(__file__).parents[1] / "configs"


@functools.cache
def shipped_files(folder: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return name and content of every configuration file of an editor."""
    return tuple((path.stem, read_yaml(path)) for path in sorted((FOLDER / folder).glob("*.yaml")))


class Shipped(NamedTuple):
    """Shipped settings, and the file they are from, as ``rome/gpt2-xl.yaml``; ``None`` without a match."""

    file: str | None
    settings: dict[str, Any]


def find_shipped(folders: tuple[str, ...], config: object) -> Shipped:
    """Return the settings for a model config from the first folder that has any."""
    for folder in folders:
        for name, content in shipped_files(folder):
            if all(getattr(config, key, None) == value for key, value in content["matches"].items()):
                return Shipped(f"{folder}/{name}.yaml", dict(content["config"]))
    return Shipped(None, {})
