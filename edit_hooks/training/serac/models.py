"""The models that SERAC's training starts from: an encoder, and a causal model with the base model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as TokenizerBase

from edit_hooks.assets.minilm import minilm_parts, require_minilm
from edit_hooks.base.shipped import DEPTH_NAMES
from edit_hooks.editors.serac import BASE
from edit_hooks.in_context.embeddings import MINILM
from edit_hooks.in_context.memory_artifact import SavedModels
from edit_hooks.in_context.scope_classifier import ScopeClassifier
from edit_hooks.modeling.architectures import num_layers
from edit_hooks.training.serac.config import SERACTrainingConfig
from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.storage.files import path_digest


def check_sources(tokenizer: TokenizerBase, config: SERACTrainingConfig, texts: Sequence[str]) -> None:
    """Check the tokenizers of both models, which loads no weight.

    Args:
        tokenizer: of the base model.
        texts: training texts, on which that and the counterfactual model's must agree.

    Raises:
        EditingError: one cannot be loaded, or the counterfactual model has another tokenizer.
    """
    if config.classifier == MINILM:
        require_minilm()
    else:
        _classifier_tokenizer(config)
    if config.counterfactual != BASE:
        require_same_tokenizer(tokenizer, config.counterfactual, texts)


def load_sources(model: PreTrainedModel, tokenizer: TokenizerBase, config: SERACTrainingConfig) -> SavedModels:
    """The untrained models in float32 on the CPU.

    Raises:
        EditingError: a model cannot be loaded or lacks tokens.
    """
    classifier = _load_classifier(config)
    counterfactual = _copy_of(model) if config.counterfactual == BASE else _load_causal(config.counterfactual)
    if config.counterfactual_blocks is not None:
        counterfactual = first_blocks(counterfactual, config.counterfactual_blocks)
    _crop_vocabulary(counterfactual, model, tokenizer, config.counterfactual)
    return SavedModels(classifier.eval(), counterfactual.eval())


def _load_classifier(config: SERACTrainingConfig) -> ScopeClassifier:
    name = config.classifier
    if name == MINILM:
        backend, encoder = minilm_parts()
        return ScopeClassifier(encoder, backend, config.pooling, "[SEP]")
    tokenizer = _classifier_tokenizer(config)
    try:
        with torch.random.fork_rng(devices=[]):  # a pooler that the checkpoint lacks is drawn, and dropped
            encoder = AutoModel.from_pretrained(name, dtype=torch.float32)
    except Exception as error:
        raise _not_loaded(name, error) from error
    return ScopeClassifier(encoder, tokenizer.backend_tokenizer, config.pooling, tokenizer.sep_token or "")


def _classifier_tokenizer(config: SERACTrainingConfig) -> Any:
    name = config.classifier
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise _not_loaded(name, error) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise EditingError(f"classifier {name!r} has no fast tokenizer; name another encoder.")
    if tokenizer.sep_token is None and config.scope_texts == "released":
        raise EditingError(f"classifier {name!r} has no separator token; use scope_texts=prompts or another encoder.")
    return tokenizer


def _not_loaded(name: str, error: Exception) -> EditingError:
    return EditingError(
        f"classifier {name!r} cannot be loaded ({first_line(error)}). Accepted: a folder with an encoder and its "
        f"tokenizer, a hub id that can be reached or is cached, or {MINILM} (extra ike)."
    )


def _load_causal(name: str) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except Exception as error:
        raise EditingError(
            f"counterfactual model {name!r} cannot be loaded ({first_line(error)}). Accepted: a folder with a causal "
            f"model and its tokenizer, a hub id that can be reached or is cached, or {BASE} (a copy of the base model)."
        ) from error
    return model


def _copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the base model in float32."""
    return _with_weights(model.config, model, f"counterfactual={BASE}")


def first_blocks(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of the first blocks of another one, with its embeddings, last norm and head.

    Raises:
        EditingError: the model has fewer blocks.
    """
    if count > num_layers(model):
        raise EditingError(
            f"counterfactual_blocks={count}, but the counterfactual model has {num_layers(model)} blocks; give at "
            "most that."
        )
    settings = model.config.to_dict()
    settings |= {name: count for name in DEPTH_NAMES if name in settings}
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == num_layers(model):  # one entry per block, as layer_types
            settings[name] = value[:count]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return _with_weights(config, model, f"counterfactual_blocks={count}")


def _with_weights(config: object, source: PreTrainedModel, what: str) -> PreTrainedModel:
    """A float32 model with a configuration and the weights of another model; further weights are left out."""
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = model.load_state_dict({name: tensor.float() for name, tensor in source.state_dict().items()}, strict=False)
    if found.missing_keys or (num_layers(model) == num_layers(source) and found.unexpected_keys):
        raise EditingError(
            f"{what}: the weights of this model cannot be copied (adapters, or quantized weights); name a folder or "
            "hub id of a causal model with the same tokenizer as counterfactual."
        )
    return model


def require_same_tokenizer(ours: TokenizerBase, name: str, texts: Sequence[str]) -> None:
    """Check that the tokenizer of a counterfactual model is that of the base model.

    Added tokens that only one of them has are allowed as long as no training text is encoded otherwise.

    Raises:
        EditingError: it has none, or another one.
    """
    try:
        theirs = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise EditingError(
            f"counterfactual model {name!r}: its tokenizer cannot be loaded ({first_line(error)}); give a folder or "
            "hub id with both."
        ) from error
    our_ids, their_ids = ours.get_vocab(), theirs.get_vocab()
    added = ours.get_added_vocab()
    other = [token for token, number in our_ids.items() if their_ids.get(token, number) != number]
    other += [token for token in our_ids if token not in their_ids and token not in added]
    other = other or [text for text in texts if _ids(ours, text) != _ids(theirs, text)]
    if other:
        raise EditingError(
            f"counterfactual model {name!r} has another tokenizer than the base model (they differ on {other[0]!r}); "
            f"give one with the same tokenizer, as gpt2 for gpt2-xl, or {BASE}."
        )


def _ids(tokenizer: TokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _crop_vocabulary(
    counterfactual: PreTrainedModel, model: PreTrainedModel, tokenizer: TokenizerBase, name: str
) -> None:
    """Cut the rows beyond the base model's vocabulary, which that cannot predict.

    Raises:
        EditingError: tokens of the tokenizer, other than added ones, are missing.
    """
    theirs, ours = (one.get_input_embeddings().weight.shape[0] for one in (counterfactual, model))
    added = tokenizer.get_added_vocab()
    needed = 1 + max(number for token, number in tokenizer.get_vocab().items() if token not in added)
    if theirs < min(needed, ours):
        raise EditingError(
            f"counterfactual model {name!r} has {theirs} tokens, and the tokenizer of the base model {needed}; give a "
            "model with all of them."
        )
    if theirs > ours:
        counterfactual.resize_token_embeddings(ours)


def trained_parameters(models: SavedModels, train_embeddings: bool) -> dict[str, nn.Parameter]:
    """The trained parameters of both models by name, tied ones once; the others are frozen."""
    classifier, counterfactual = models
    frozen = set[int]()
    if not train_embeddings:
        ends = (counterfactual.get_input_embeddings(), counterfactual.get_output_embeddings())
        frozen = {id(parameter) for module in ends for parameter in module.parameters()}
    trained = {}
    for prefix, model in (("classifier", classifier.encoder), ("counterfactual", counterfactual)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(id(parameter) not in frozen)
            if parameter.requires_grad:
                trained[f"{prefix}/{name}"] = parameter
    return trained


def local_digest(name: str) -> str | None:
    """SHA-256 of a source that is a folder here; ``None`` for a hub id."""
    return path_digest(Path(name).expanduser()) if name not in (BASE, MINILM) else None


def safetensors_folder(folder: Path) -> Path:
    """A folder of a model whose weights are in safetensors files.

    Raises:
        EditingError: for a missing folder, and for one with weights in other files only.
    """
    if not folder.is_dir():
        raise EditingError(f"there is no folder {folder}; it has to hold a model of transformers and its tokenizer.")
    if not any(folder.glob("*.safetensors")):
        raise EditingError(
            f"{folder} has no safetensors file; load the model where it was trained and save it with save_pretrained."
        )
    return folder
