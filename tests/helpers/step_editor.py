"""A trained editor as another package would bring it: one gradient step, whose size is learned for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks import (
    ArtifactKind,
    Delta,
    EditJob,
    Editor,
    EditorConfig,
    architecture_of,
    compare_models,
    config_field,
    frozen,
    model_identity,
    split_continuation,
)
from edit_hooks.training import LossTerms, NumberedExample, Trainer, TrainingQuestions, TrainingSettings

STEP = ArtifactKind("step-editor/1", "step.safetensors", "step size", "lm-edit train step_editor:StepEditor")


@dataclass(kw_only=True)
class StepConfig(EditorConfig):
    """Settings of the step."""

    artifact: str | None = config_field("folder written by lm-edit train", default=None)
    artifact_digest: str | None = config_field("set by the editor: checksum of the artifact", default=None)


class StepEditor(Editor[StepConfig]):
    """A gradient step of a trained size."""

    name = "step_editor"
    config_class = StepConfig
    needs_subject = False
    trainer = "step_editor:StepTrainer"
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1]}

    def default_config(self, model: nn.Module) -> StepConfig:
        config = super().default_config(model)
        if config.artifact is not None:
            config.record_digest("artifact_digest", "artifact", STEP.digest(config.artifact))
            STEP.apply_settings(config, self.overrides, config.artifact, STEP.read_manifest(config.artifact))
        return config

    def prepare(self, config: StepConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        recorded = STEP.read_manifest(str(config.artifact))["model"]
        compare_models(recorded, model_identity(model, tokenizer), f"the step in {config.artifact}")

    def compute(self, job: EditJob[StepConfig]) -> list[Delta]:
        size = STEP.load(str(job.config.artifact))[0]["log_size"].exp()
        name = edited_weight(job.model, job.config)
        with frozen(job.model), torch.enable_grad():
            steps = [gradient(job.model, job.tokenizer, name, r.text, r.continuation) for r in job.requests]
        return [Delta(dense={name: -size * step}) for step in steps]


@dataclass(kw_only=True)
class StepTrainingConfig(StepConfig, TrainingSettings):
    """Settings of the step and of its training."""

    start: float = config_field("logarithm of the size before training", default=-6.0)


class StepLoss:
    """The target's NLL at a paraphrase after the step; there is no locality term."""

    def __init__(self, trainer: StepTrainer, tokenizer: PreTrainedTokenizerBase) -> None:
        self.trainer, self.tokenizer = trainer, tokenizer
        self.questions = TrainingQuestions(trainer.config, trainer.data.train)

    def __call__(self, batches: Sequence[Sequence[NumberedExample]], observe: bool) -> list[LossTerms]:
        return [self._terms(batch, self.trainer.log_size.exp()) for batch in batches]

    def unedited(self, batch: Sequence[NumberedExample]) -> dict[str, float]:
        loss, metrics = self._terms(batch, torch.zeros(()))
        return {"loss": float(loss), **metrics}

    def _terms(self, batch: Sequence[NumberedExample], size: torch.Tensor) -> LossTerms:
        model, name = self.trainer.model, edited_weight(self.trainer.model, self.trainer.config)
        with torch.enable_grad():
            steps = [gradient(model, self.tokenizer, name, e.prompt, f" {e.target}") for e, _ in batch]
        weights = {name: model.get_parameter(name).detach() - size * torch.stack(steps).mean(0)}
        asked = [(self.questions.edit_prompt(example, number), example.target) for example, number in batch]
        loss = torch.stack([nll(model, self.tokenizer, weights, prompt, f" {t}") for prompt, t in asked]).mean()
        return LossTerms(loss, {"edit": float(loss.detach()), "locality": 0.0})


class StepTrainer(Trainer[StepTrainingConfig]):
    """Trains the size of the step."""

    config_class = StepTrainingConfig
    kind = STEP
    title = "the step"
    resume_format = "step-editor/resume/1"
    artifact_settings = ("layers",)

    def set_up(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.log_size = nn.Parameter(torch.tensor(self.config.start))
        self.loss = StepLoss(self, tokenizer)
        self.optimizer = torch.optim.Adam([self.log_size], lr=self.config.lr)

    def trained_parameters(self) -> list[nn.Parameter]:
        return [self.log_size]

    def state(self) -> dict[str, torch.Tensor]:
        return {"log_size": self.log_size.detach()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        self.log_size.copy_(tensors["log_size"])

    def save_artifact(self) -> None:
        STEP.save(self.out, self.state(), self.manifest(), self.training_digests())


def edited_weight(model: PreTrainedModel, config: StepConfig) -> str:
    return f"{architecture_of(model).rewrite_name(config.edited_layers[-1])}.weight"


def gradient(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, prompt: str, continuation: str
) -> torch.Tensor:
    """Of the NLL with respect to the edited weight."""
    weight = model.get_parameter(name).detach().clone().requires_grad_()
    (step,) = torch.autograd.grad(nll(model, tokenizer, {name: weight}, prompt, continuation), weight)
    return step


def nll(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, torch.Tensor],
    prompt: str,
    continuation: str,
) -> torch.Tensor:
    """Mean negative log-likelihood of the continuation under other weights."""
    before, target = split_continuation(tokenizer, prompt, continuation)
    ids_1T = torch.tensor([[*before, *target[:-1]]])
    logits_1TV = functional_call(model, dict(weights), (ids_1T,), {"use_cache": False}).logits
    return nn.functional.cross_entropy(logits_1TV[0, len(before) - 1 :].float(), torch.tensor(target))
