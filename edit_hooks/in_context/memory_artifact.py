"""Artifacts of SERAC's training: scope classifier and counterfactual model.

The file (:mod:`edit_hooks.base.artifacts.trained_artifact`) holds the weights of both, and in its
manifest their configurations, the classifier's tokenizer and the identity of the base model. Tied weights are stored
once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from edit_hooks.base.artifacts.trained_artifact import ArtifactKind
from edit_hooks.in_context.scope_classifier import ScopeClassifier
from edit_hooks.utils.errors import EditingError, first_line

FORMAT = "lm-eval-editing/serac/1"
MEMORY_MODELS = ArtifactKind(
    FORMAT, "serac.safetensors", "scope classifier and counterfactual model", "lm-edit train serac"
)
CLASSIFIER, COUNTERFACTUAL = "classifier", "counterfactual"


class SavedModels(NamedTuple):
    """The trained models in evaluation mode, on the CPU."""

    classifier: ScopeClassifier
    counterfactual: PreTrainedModel


def save_models(
    models: SavedModels, manifest: Mapping[str, Any], folder: Path, training_digests: Collection[int] = ()
) -> None:
    """Write the artifact.

    Args:
        manifest: base model, data, steps, losses (JSON-able). Configurations and tokenizer are added.
        training_digests: :func:`~edit_hooks.base.artifacts.trained_artifact.edit_digest` of every training edit.
    """
    classifier, counterfactual = models
    full = {
        **manifest,
        "format": FORMAT,
        "models": {
            CLASSIFIER: _config(classifier.encoder),
            COUNTERFACTUAL: _config(counterfactual),
            "tokenizer": classifier.tokenizer.to_str(),
            "pooling": classifier.pooling,
            "separator": classifier.separator,
        },
    }
    tensors = _named(CLASSIFIER, classifier.encoder) | _named(COUNTERFACTUAL, counterfactual)
    MEMORY_MODELS.save(folder, tensors, full, training_digests)


def load_models(path: str | Path) -> tuple[SavedModels, dict[str, Any]]:
    """The trained models and their manifest.

    Raises:
        EditingError: there is no artifact at ``path``, or the file is damaged or of another kind.
    """
    tensors, manifest = MEMORY_MODELS.load(path)
    try:
        described = manifest["models"]
        encoder = _built(AutoModel, described[CLASSIFIER])
        counterfactual = _built(AutoModelForCausalLM, described[COUNTERFACTUAL])
        tokenizer = Tokenizer.from_str(described["tokenizer"])
        classifier = ScopeClassifier(encoder, tokenizer, described["pooling"], described["separator"])
        for prefix, model in ((CLASSIFIER, encoder), (COUNTERFACTUAL, counterfactual)):
            _fill(prefix, model, tensors)
    except Exception as error:  # the content of a file, read by other libraries
        raise EditingError(
            f"the {MEMORY_MODELS.what} in {MEMORY_MODELS.file(path)} cannot be built: {first_line(error)}. Is it of a "
            "later release, or trained with another release of transformers? Train it again."
        ) from error
    return SavedModels(classifier.eval(), counterfactual.eval()), manifest


def _config(model: PreTrainedModel) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)  # where it was read from is no part of the artifact's identity
    return config


def _built(auto: Any, config: Mapping[str, Any]) -> PreTrainedModel:
    """A model with any weights, in float32."""
    settings = {name: value for name, value in config.items() if name not in ("model_type", "dtype")}
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = auto.from_config(
            AutoConfig.for_model(config["model_type"], **settings), dtype=torch.float32
        )
    return model.requires_grad_(False)


def _named(prefix: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, tied ones once."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    persistent = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {f"{prefix}/{name}": tensor for name, tensor in {**parameters, **buffers}.items()}


@torch.no_grad()
def _fill(prefix: str, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the stored weights into a model.

    Raises:
        ValueError: they are not those of this model.
    """
    wanted = _named(prefix, model)
    stored = {name for name in tensors if name.startswith(f"{prefix}/")}
    if stored != set(wanted):
        raise ValueError(f"the weights of the {prefix} differ in {', '.join(sorted(stored ^ set(wanted))[:3])}")
    for name, tensor in wanted.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(f"{name} has the shape {list(tensors[name].shape)}, not {list(tensor.shape)}")
        tensor.copy_(tensors[name])
