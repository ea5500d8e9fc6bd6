"""Untrained artifacts and training runs of SERAC on tiny models."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any

import torch
from mend_runs import DATA
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from edit_hooks.contract.tiny_models import SENTENCES, build_model
from edit_hooks.editors.serac import SERAC
from edit_hooks.in_context.memory_artifact import SavedModels, save_models
from edit_hooks.in_context.scope_classifier import ScopeClassifier
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.training.edit_data import EditData
from edit_hooks.training.serac.config import SERACTrainingConfig
from edit_hooks.training.serac.trainer import SERACTrainer
from edit_hooks.training.settings import resolve_settings

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def encoder_tokenizer() -> Tokenizer:
    """A lower-case word-piece tokenizer with [CLS] and [SEP]: the words of the tiny models' sentences, and letters."""
    words = sorted({word for sentence in SENTENCES for word in re.findall("[a-z]+", sentence.lower())})
    pieces = [*SPECIAL, *string.printable[:36], *(f"##{letter}" for letter in string.printable[:36]), *words]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=list(ids.items())
    )
    return tokenizer


def build_encoder(seed: int = 0) -> BertModel:
    """A random encoder of two blocks, whose states depend on the whole text."""
    config = BertConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertModel(config, add_pooling_layer=False).eval()


def save_encoder(folder: Path, **changes: Any) -> str:
    """The random encoder as a folder that ``classifier`` can name."""
    build_encoder(**changes).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=encoder_tokenizer(),
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")},
    ).save_pretrained(folder)
    return str(folder)


def untrained_models(base: PreTrainedModel, scope: str, **overrides: Any) -> SavedModels:
    """A random encoder and a random model of the base's family.

    Args:
        scope: wide: every question is in the scope of every fact; narrow: those that share most words are.
    """
    encoder = build_encoder()
    if scope == "wide":
        torch.nn.init.zeros_(encoder.encoder.layer[-1].output.LayerNorm.weight)  # one vector for all texts
    classifier = ScopeClassifier(encoder, encoder_tokenizer(), "cls", "[SEP]")
    return SavedModels(classifier, build_model(base.config.model_type, seed=7, **overrides))


def save_untrained(
    folder: Path, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, scope: str = "narrow", **overrides: Any
) -> SavedModels:
    """Write the untrained models as an artifact for the base model."""
    settings = {
        "classifier": "tiny",
        "pooling": "cls",
        "scope_texts": "prompts",
        "counterfactual": "tiny",
        "counterfactual_blocks": None,
    }
    manifest = {"model": model_identity(base, tokenizer).to_dict(), "editor": settings, "training": {}}
    saved = untrained_models(base, scope, **overrides)
    save_models(saved, manifest, folder)
    return saved


SETTINGS: dict[str, Any] = {
    "num_steps": 40,
    "accumulate": 1,
    "edits_per_example": 3,
    "lr": 3e-3,
    "c_edit": 1.0,
    "validate_every": 10,
    "locality_tokens": "answer",
}


def training_config(model: PreTrainedModel, settings: dict[str, Any]) -> SERACTrainingConfig:
    return resolve_settings(SERACTrainingConfig, SERAC, model, settings)


def trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    classifier: str,
    data: EditData = DATA,
    **changes: Any,
) -> SERACTrainer:
    config = training_config(model, {**SETTINGS, "classifier": classifier, **changes})
    return SERACTrainer(model, tokenizer, config, data, out, {"model_name": "tiny"}, quiet=True)
