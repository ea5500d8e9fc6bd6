"""Settings files of EasyEdit and of the releases of ROME, MEMIT and AlphaEdit, as settings files of this package."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from edit_hooks.base.registry import editor_class, editor_names, load_editor
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.settings.numbers import shorten
from edit_hooks.utils.settings.released_settings import NAMES, is_released, translate
from edit_hooks.utils.storage.files import read_text, require_file
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.storage.yaml_io import parse_yaml

# alg_name there -> editor here, where they differ by more than case and hyphens.
EDITORS: Mapping[str, str] = {
    "ft": "ft_l",  # its prompt_last objective; target_new is ft_m's
    "ftm": "ft_m",
    "ftl": "ft_l",
    "rrome": "r_rome",
    "locftbf": "loc_ft",
}
MODULE = re.compile(r"(?:layers|h|blocks)[.\[](\d+)\]?\.")
# Read from the model or from the data here.
FROM_MODEL: Mapping[str, str] = {
    "rewrite_module_tmp": "the module is read from the model",
    "layer_module_tmp": "the module is read from the model",
    "mlp_module_tmp": "the module is read from the model",
    "attn_module_tmp": "the module is read from the model",
    "ln_f_module": "the module is read from the model",
    "lm_head_module": "the module is read from the model",
    "model_name": "pretrained=... of the model",
    "model_parallel": "parallelize=True of the model",
    "device": "device=... of the model",
    "tokenizer_class": "read from the model",
    "tokenizer_name": "tokenizer=... of the model",
    "max_length": "requests are never cut",
    "mom2_adjustment": "second_moments",
    "mom2_dataset": "second_moments",
    "mom2_n_samples": "moment_tokens, in tokens",
    "mom2_dtype": "moment_dtype",
    "stats_dir": "lm-edit stats, or lm-edit stats import of its files",
    "P_loc": "projectors, of lm-edit stats import",
    "alg_name": "the editor",
    "objective_optimization": "the editor: ft_m for target_new, ft_l for prompt_last",
    "archive": "artifact, of lm-edit import",
    "results_dir": "--output_path of lm_eval",
    "sequential_edit": "mode=sequential",
}


class ImportedSettings(NamedTuple):
    """The settings of a file.

    Attributes:
        editor: its name here.
        settings: in the names of the editor.
        elsewhere: setting there -> where it is given here.
        without_counterpart: setting there -> its value.
        text: a settings file with comments that name both.
    """

    editor: str
    settings: dict[str, Any]
    elsewhere: dict[str, str]
    without_counterpart: dict[str, Any]
    text: str


def read_hparams(file: str, editor: str | None = None) -> ImportedSettings:
    """Read and translate a settings file.

    Args:
        file: YAML, or JSON.
        editor: the editor; by default that of ``alg_name``, which the JSON files of releases do not have.

    Raises:
        EditingError: for a file that is none of these, an unknown method, and values that the editor refuses.
    """
    path = require_file(file, "settings file")
    try:
        content = read_json(path) if path.suffix == ".json" else parse_yaml(read_text(path, "settings file"))
    except ValueError as error:
        raise EditingError(f"{path} cannot be read: {error}.") from None
    if not isinstance(content, dict) or not is_released(content):
        raise EditingError(
            f"{path} has none of the settings by which files of EasyEdit and the releases are known (alg_name, "
            "rewrite_module_tmp, inner_params); a settings file of this package needs no translation."
        )
    name = editor or _editor_of(content, path)
    known = [option for option in _settings_of(name) if not option.endswith("_digest")]
    settings = translate(content, known)
    if "layers" in known and "layers" not in settings and (layers := _layers_of(content)):
        settings["layers"] = layers
    load_editor(name, settings)  # values that it refuses are named here
    done = {theirs for theirs, ours in NAMES.items() if ours in settings} | set(settings)
    if settings.get("layers") == _layers_of(content):
        done.add("inner_params")
    rest = {key: value for key, value in content.items() if key not in done}
    elsewhere = {key: FROM_MODEL[key] for key in rest if key in FROM_MODEL}
    without = {key: value for key, value in rest.items() if key not in FROM_MODEL}
    return ImportedSettings(name, settings, elsewhere, without, _text(path, name, settings, elsewhere, without))


def _settings_of(editor: str) -> list[str]:
    return [item.name for item in dataclasses.fields(editor_class(editor).config_class)]


def _editor_of(content: Mapping[str, Any], path: Path) -> str:
    method = content.get("alg_name")
    if not isinstance(method, str):
        raise EditingError(f"{path} has no alg_name, as the files of releases; name the editor: --editor memit.")
    if content.get("objective_optimization") == "target_new":
        return "ft_m"
    name = re.sub(r"[^a-z0-9]", "", method.lower())
    names = {re.sub(r"[^a-z0-9]", "", known): known for known in editor_names()}
    if (found := EDITORS.get(name) or names.get(name)) is None:
        hint = near_misses(name, names)
        raise EditingError(f"{path}: there is no editor for alg_name {method!r}.{hint} Name one: --editor memit.")
    return found


def _layers_of(content: Mapping[str, Any]) -> list[int]:
    """The blocks of ``inner_params``, as of ``model.layers[27].mlp.down_proj.weight``."""
    names = content.get("inner_params")
    found = [MODULE.search(str(name)) for name in names] if isinstance(names, list) else []
    return sorted({int(match[1]) for match in found if match})


def _text(
    path: Path, editor: str, settings: Mapping[str, Any], elsewhere: Mapping[str, str], without: Mapping[str, Any]
) -> str:
    lines = [f"# {editor}, from {path.name}"]
    lines += [f"# {key}: {place}" for key, place in elsewhere.items()]
    lines += [f"# without a counterpart: {key}: {_one_line(value)}" for key, value in without.items()]
    body = yaml.safe_dump(dict(settings), sort_keys=True, default_flow_style=None) if settings else "{}\n"
    return "\n".join(lines) + "\n" + body


def _one_line(value: Any) -> str:
    return " ".join(shorten(value).split())
