"""Editors with one defect each, named after the check of the contract that finds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from edit_hooks import Delta, EditJob, EditRequest
from edit_hooks.editors.ft_m import FTM, FTConfig
from edit_hooks.gradient.labeled_rows import LabeledRow, target_row


class Sound(FTM):
    """Passes every check; the others differ from it in one method."""

    name = "sound"


class _Scaled(Sound):
    """Multiplies the updates by `factor`, which a subclass makes depend on something."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        raise NotImplementedError

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        factor = self.factor(job)
        deltas = super().compute(job)
        return [
            dataclasses.replace(delta, dense={name: update * factor for name, update in delta.dense.items()})
            for delta in deltas
        ]


class Restore(Sound):
    """Leaves a weight changed."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        deltas = super().compute(job)
        with torch.no_grad():
            next(job.model.parameters()).add_(1e-3)
        return deltas


class Interrupt(Sound):
    """Switches the model to training mode for the edit, without a `finally`."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        job.model.train()
        deltas = super().compute(job)
        job.model.eval()
        return deltas


class Effect(_Scaled):
    """Updates of zeros."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return 0.0


class Target(_Scaled):
    """Steps uphill."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return -1.0


class Batch(_Scaled):
    """Divides by the size of the batch."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return 1 / len(job.requests)


class Padding(_Scaled):
    """Depends on the tokenizer's padding side."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return 2.0 if job.tokenizer.padding_side == "left" else 1.0


class Null(Sound):
    """Returns a delta without a request."""

    def edit(self, model: Any, tokenizer: Any, requests: Sequence[EditRequest], **arguments: Any) -> list[Delta]:
        return super().edit(model, tokenizer, requests, **arguments) or [Delta()]


class Joint(_Scaled):
    """Gives another edit in joint mode."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return 0.5 if job.joint else 1.0


class Stream(_Scaled):
    """Keeps state between calls outside the deltas."""

    calls = itertools.count(1)

    def factor(self, job: EditJob[FTConfig]) -> float:
        return 1 + 0.01 * next(self.calls)


class Save(Sound):
    """Records a tuple, which comes back from JSON as a list."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        deltas = super().compute(job)
        for delta in deltas:
            delta.diagnostics["range"] = (0, 1)
        return deltas


class Seed(_Scaled):
    """Draws from the global generator."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return 1 + 0.1 * float(torch.rand(()))


class GradientsOff(Sound):
    """Fails where the caller has switched gradients off."""

    def edit(self, model: Any, tokenizer: Any, requests: Sequence[EditRequest], **arguments: Any) -> list[Delta]:
        assert torch.is_grad_enabled()
        return super().edit(model, tokenizer, requests, **arguments)


class TrainingMode(_Scaled):
    """Depends on the mode in which the caller left the model."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return 2.0 if job.model.training else 1.0


class Errors(Sound):
    """Ignores settings that it does not have."""

    def __init__(self, overrides: Any = None) -> None:
        known = {field.name for field in dataclasses.fields(self.config_class)}
        super().__init__({name: value for name, value in (overrides or {}).items() if name in known})


class Diagnostics(Sound):
    """Records a loss that is not a number."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        deltas = super().compute(job)
        deltas[0].diagnostics["final_loss"] = float("nan")
        return deltas


class Context(Sound):
    """Puts a space before the target, after the line break of a chat template too."""

    def row(self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: FTConfig) -> LabeledRow:
        return target_row(tokenizer, request.text, f" {request.target_new}")
