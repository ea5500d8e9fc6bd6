"""Shipped editor configurations: one YAML per editor and model, found by the shape of the model, never by its name.

A file holds ``matches`` (values of the model's config that must all be equal), ``config`` (only what differs from the
editor's defaults) and ``source`` (where the values come from).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from edit_hooks.errors import EditingError

FOLDER = Path(__file__).parent


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


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping from a file.

    Raises:
        EditingError: when the file is missing, is not YAML or holds something else than a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EditingError(f"cannot read {path}: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise EditingError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise EditingError(f"{path} holds {type(content).__name__}, a mapping of settings is needed.")
    return content
