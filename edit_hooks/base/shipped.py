"""Shipped editor configurations: one YAML file per editor and model.

A file is selected by the shape of the model, never by its name. It holds ``matches`` (values of the model's config that
must all be equal), ``config`` (settings that differ from the editor's defaults), ``source`` (origin of the values), and
for an editor that is trained optionally ``training`` (settings that differ from the defaults of its training).
Editors of other packages bring folders of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edit_hooks.base.config import EditorConfig
from edit_hooks.base.kin import kin_of
from edit_hooks.modeling.architectures import num_layers, text_config
from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from edit_hooks.utils.storage.yaml_io import read_yaml

FOLDER = Path(__file__).parents[1] / "configs"
DEPTH_NAMES = ("num_hidden_layers", "n_layer")  # in ``matches``
KEYS: dict[str, type] = {"matches": dict, "config": dict, "source": str, "training": dict}
OPTIONAL = ("training",)
ConfigT = TypeVar("ConfigT", bound=EditorConfig)


@functools.cache
def shipped_files(folder: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return name and content of every configuration file of an editor.

    Raises:
        EditingError: for a folder that is not there, as if it were not in the package, and for other files.
    """
    place = FOLDER / folder
    if not place.is_dir():
        raise EditingError(f"{place}, which an editor names in config_folders, is not there; ship it with the editor.")
    return tuple((path.stem, _read(path)) for path in sorted(place.glob("*.yaml")))


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if unknown := [key for key in content if key not in KEYS]:
        raise unknown_keys_error(f"key in the settings file {path}:", unknown, KEYS)
    for key, kind in KEYS.items():
        if key not in content and key in OPTIONAL:
            continue
        if not isinstance(content.get(key), kind):
            raise EditingError(f"settings file {path}: a {'text' if kind is str else 'mapping'} is needed as {key!r}.")
    return content


class ShippedSettings(NamedTuple):
    """Shipped settings, and the file they are from, as ``rome/gpt2-xl.yaml``; ``None`` without a match.

    Attributes:
        training: settings of the editor's training.
        kin: the model, if the file is for another one and was taken by a rule (:mod:`edit_hooks.base.kin`).
    """

    file: str | None
    settings: dict[str, Any]
    training: dict[str, Any]
    kin: str | None = None

    @property
    def guesses(self) -> tuple[str, ...]:
        """What was not chosen for the model, as clauses."""
        return () if self.kin is None else (f"a rule gives {self.kin} these settings, which are untuned for it",)

    def under(self, overrides: Mapping[str, Any], config_class: type[ConfigT]) -> ConfigT:
        """The configuration with these settings and a user's over them.

        Raises:
            EditingError: for settings that cannot be used; names the file.
        """
        try:
            return config_class.from_mapping(config_class.overridden(self.settings, overrides))
        except EditingError as error:
            if self.file is None:
                raise
            raise EditingError(f"{error} (Shipped settings: {self.file}.)") from None


def find_shipped(folders: Sequence[str], config: Any, name: str | None = None) -> ShippedSettings:
    """Return the settings of the first folder that has any for a model.

    Args:
        folders: those of one editor.
        config: the model's configuration; its shape selects the file.
        name: the file with this name instead, with its blocks moved to the model (:func:`_moved`).
    """
    if name is not None:
        folder, content = find_file(folders, name)
        moved = _moved(content, num_layers(config))
        return ShippedSettings(f"{folder}/{name}.yaml", moved, dict(content.get("training", {})))
    config = text_config(config)
    for folder in folders:
        for stem, content in shipped_files(folder):
            if all(getattr(config, key, None) == value for key, value in content["matches"].items()):
                return ShippedSettings(
                    f"{folder}/{stem}.yaml", dict(content["config"]), dict(content.get("training", {}))
                )
    return _of_kin(folders, config) or ShippedSettings(None, {}, {})


def _of_kin(folders: Sequence[str], config: Any) -> ShippedSettings | None:
    """The settings of a listed model without a file of its own, moved from another one's."""
    kin = kin_of(config)
    names = {stem for folder in folders for stem, _ in shipped_files(folder)}
    name = next((name for name in kin.like if name in names), None) if kin else None
    return None if kin is None or name is None else find_shipped(folders, config, name)._replace(kin=kin.name)


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


def names_blocks(setting: str, value: Any) -> bool:
    """Whether a setting of a file names blocks, which are others in a model of another depth."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_blocks, value.values()))
    return _is_blocks(value) or (setting.endswith("_layer") and type(value) is int)


def _is_blocks(value: Any) -> bool:
    """Whether a setting is a list of block numbers; shipped files have no other lists of whole numbers."""
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)
