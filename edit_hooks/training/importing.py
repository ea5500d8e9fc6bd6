"""Artifacts of weights that were trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.registry import editor_class
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.tensors import require_tensors
from edit_hooks.training.find import trainer_class
from edit_hooks.training.settings import resolve_settings
from edit_hooks.training.trainer import ImportSource, describe_model
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import path_digest, user_path, without_folders
from edit_hooks.utils.storage.outputs import check_output_folder


def check_import(weights: str | Path, out: str | Path) -> tuple[Path, Path]:
    """Check weights and output folder as far as that needs no model; return their paths with ``~`` expanded.

    Raises:
        EditingError: for missing weights, weights without a safetensors file, and a folder that is not empty.
    """
    source, folder = user_path(weights, "weights"), check_output_folder(out)
    if source.is_dir():
        if not any(source.rglob("*.safetensors")):
            raise EditingError(f"the folder of weights {weights} has no safetensors file.")
    else:
        require_tensors(source, "file of weights")
    return source, folder


def import_artifact(
    editor: str,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    weights: str | Path,
    out: str | Path,
    settings: Mapping[str, Any] | None = None,
    model_name: str | None = None,
) -> Path:
    """Write an artifact of weights that were trained elsewhere; return its folder, for the editor's ``artifact``.

    Args:
        editor: name of an editor that is trained.
        model: the model that they were trained for.
        weights: for ``mend`` a safetensors file with the names of MEND's release, for ``serac`` a folder with the
            folders ``classifier`` and ``counterfactual`` of transformers.
        out: a new folder.
        settings: those of the editor under which the weights were trained.
        model_name: recorded in the manifest.

    Raises:
        EditingError: for weights that cannot be read, or do not fit the model and the settings.
    """
    source, folder = check_import(weights, out)
    chosen, inner = editor_class(editor), unwrapped(model)
    trainer = trainer_class(chosen)
    config = resolve_settings(trainer.config_class, chosen, inner, settings or {})
    info = describe_model(inner, tokenizer) | ({"model_name": without_folders(model_name)} if model_name else {})
    imported = {"weights": source.name, "sha256": path_digest(source)}
    trainer.import_artifact(inner, tokenizer, config, source, ImportSource(info, imported, folder))
    return folder
