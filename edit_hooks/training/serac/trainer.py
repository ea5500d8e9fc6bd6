"""Training of SERAC's scope classifier and counterfactual model (:mod:`edit_hooks.training.trainer`).

One Adam optimizer serves both. The loss is :class:`~edit_hooks.training.serac.loss.SERACLoss`. Dropout is off, as in
the released settings.

Not copied from EasyEdit: it takes the loss on the edit itself (``edit_loss: edit`` does the same), so the classifier
never sees a paraphrase; it takes the locality loss at the answer's tokens instead of those that predict them, and keeps
the last checkpoint.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.in_context.memory_artifact import MEMORY_MODELS, save_models
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.training.edit_data import EditData
from edit_hooks.training.serac.config import ARTIFACT_SETTINGS, SERACTrainingConfig
from edit_hooks.training.serac.loss import SERACLoss
from edit_hooks.training.serac.models import (
    check_sources,
    load_sources,
    local_digest,
    safetensors_folder,
    trained_parameters,
)
from edit_hooks.training.trainer import ImportSource, Trainer

SOURCES = ("classifier", "counterfactual")  # settings, and folders of imported weights
IMPORTED = "imported"  # recorded in their place


class SERACTrainer(Trainer[SERACTrainingConfig]):
    """Trains a scope classifier and a counterfactual model into a folder."""

    config_class = SERACTrainingConfig
    kind = MEMORY_MODELS
    title = "SERAC"
    resume_format = "lm-eval-editing/serac-resume/1"
    artifact_settings = ARTIFACT_SETTINGS

    @classmethod
    def check_inputs(cls, config: SERACTrainingConfig, tokenizer: PreTrainedTokenizerBase, data: EditData) -> None:
        check_sources(tokenizer, config, [example.statement for example in data.train])

    @classmethod
    def import_artifact(
        cls,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: SERACTrainingConfig,
        weights: Path,
        source: ImportSource,
    ) -> None:
        """Write the artifact of an encoder and a causal model, in Hugging Face folders with safetensors files."""
        classifier, counterfactual = (str(safetensors_folder(weights / name)) for name in SOURCES)
        config = dataclasses.replace(config, classifier=classifier, counterfactual=counterfactual)
        check_sources(tokenizer, config, ())
        models = load_sources(unwrapped(model), tokenizer, config)
        # the names of folders here are no part of what was imported
        settings = {**{name: config.to_dict()[name] for name in ARTIFACT_SETTINGS}, **dict.fromkeys(SOURCES, IMPORTED)}
        save_models(models, source.manifest(settings), source.out)

    def set_up(self, tokenizer: PreTrainedTokenizerBase) -> None:
        config = self.config
        self.check_inputs(config, tokenizer, self.data)
        self.sources = {name: local_digest(getattr(config, name)) for name in SOURCES}
        self.models = load_sources(self.model, tokenizer, config)
        device = input_device(self.model)
        self.models.classifier.to(device)
        self.models.counterfactual.to(device)
        self.trained = trained_parameters(self.models, config.train_embeddings)
        self.loss = SERACLoss(self.model, tokenizer, self.models, config, self.data.train)
        self.optimizer = torch.optim.Adam(self.trained.values(), lr=config.lr)

    def trained_parameters(self) -> list[nn.Parameter]:
        return list(self.trained.values())

    def state(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.trained.items()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(tensors[name])

    def save_artifact(self) -> None:
        save_models(self.models, {**self.manifest(), "sources": self.sources}, self.out, self.training_digests())
