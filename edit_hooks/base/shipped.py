"""Shipped editor configurations: one YAML file per editor and model.

A file is selected by the shape of the model, never by its name. It holds ``matches`` (values of the model's config that
must all be equal), ``config`` (settings that differ from the editor's defaults) and ``source`` (origin of the values).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.modeling.architectures import num_layers
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.yaml_io import read_yaml

FOLDER = Path(__file__).parents[1] / "configs"
DEPTH_NAMES = ("num_hidden_layers", "n_layer")  # in ``matches``


@functools.cache
def shipped_files(folder: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return name and content of every configuration file of an editor."""
    return tuple((path.stem, read_yaml(path)) for path in sorted((FOLDER / folder).glob("*.yaml")))


class Shipped(NamedTuple):
    """Shipped settings, and the file they are from, as ``rome/gpt2-xl.yaml``; ``None`` without a match."""

    file: str | None
    settings: dict[str, Any]


def find_shipped(folders: Sequence[str], config: Any, name: str | None = None) -> Shipped:
    """Return the settings of the first folder that has any for a model.

    Args:
        folders: those of one editor.
        config: the model's configuration; its shape selects the file.
        name: the file with this name instead, with its blocks moved to the model (:func:`_moved`).
    """
    if name is not None:
        folder, content = find_file(folders, name)
        return Shipped(f"{folder}/{name}.yaml", _moved(content, num_layers(config)))
    for folder in folders:
        for stem, content in shipped_files(folder):
            if all(getattr(config, key, None) == value for key, value in content["matches"].items()):
                return Shipped(f"{folder}/{stem}.yaml", dict(content["config"]))
    return Shipped(None, {})


def find_file(folders: Sequence[str], name: str) -> tuple[str, dict[str, Any]]:
    """Return folder and content of the file with a name, from the first folder that has it.

    Raises:
        EditingError: for a name that no folder has; lists the names.
    """
    names = [stem for folder in folders for stem, _ in shipped_files(folder)]
    for folder in folders:
        for stem, content in shipped_files(folder):
            if stem == name:
                return folder, content
    listed = f"it has {', '.join(sorted(set(names)))}" if names else "it has no shipped settings of its own"
    raise EditingError(
        f"editor setting 'shipped': no file {name!r} for this editor; {listed}.{near_misses(name, names)}"
    )


def _moved(content: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The settings of a file for a model of ``depth`` blocks.

    Lists of blocks keep their number of blocks and their gaps; the last block keeps its relative depth. Blocks that
    would lie below the first are left out. A single block (a setting named ``..._layer``) keeps its distance to those
    of ``layers``.
    """
    (depth_there,) = (content["matches"][name] for name in DEPTH_NAMES if name in content["matches"])

    def shift(blocks: list[int]) -> int:
        return round(max(blocks) * (depth - 1) / (depth_there - 1)) - max(blocks)

    def move(blocks: list[int]) -> list[int]:
        return [block + shift(blocks) for block in blocks if block + shift(blocks) >= 0]

    config = dict(content["config"])
    for setting, value in config.items():
        if _is_blocks(value):
            config[setting] = move(value)
        elif setting.endswith("_layer") and type(value) is int:
            config[setting] = max(0, value + shift(content["config"]["layers"]))
        elif isinstance(value, Mapping) and value and all(map(_is_blocks, value.values())):
            config[setting] = {module: move(blocks) for module, blocks in value.items()}
    return config


def _is_blocks(value: Any) -> bool:
    """Whether a setting is a list of block numbers; shipped files have no other lists of whole numbers."""
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)
