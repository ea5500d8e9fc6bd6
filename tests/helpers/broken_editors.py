"""Editors with one defect each, most named after the check of the contract that finds it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
import torch
from transformers import PreTrainedTokenizerBase

from edit_hooks import Delta, EditJob, EditRequest
from edit_hooks.deltas.delta import Factor
from edit_hooks.editors.ft_m import FTM, FTConfig
from edit_hooks.gradient.labeled_rows import LabeledRow, target_row
from edit_hooks.modeling.architectures import architecture_of, is_transposed
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import split_continuation


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


class Diverges(_Scaled):
    """Updates that are not numbers."""

    def factor(self, job: EditJob[FTConfig]) -> float:
        return float("nan")


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


class Repeat(_Scaled):
    """Counts its calls in the object, and scales by them."""

    calls = 0

    def factor(self, job: EditJob[FTConfig]) -> float:
        self.calls += 1
        return 1 + 0.1 * self.calls


class WritesConfig(Sound):
    """Writes into the configuration, which all calls share."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        deltas = super().compute(job)
        job.config.num_steps = 1
        return deltas


class Layers(Sound):
    """Edits block 1 whatever the settings say."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        return super().compute(dataclasses.replace(job, config=dataclasses.replace(job.config, layers=[1])))


class JointDrops(Sound):
    """A joint edit is that of its first request."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        return super().compute(dataclasses.replace(job, requests=job.requests[:1]) if job.joint else job)


class NoProgress(Sound):
    """Never reports progress."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        return super().compute(dataclasses.replace(job, progress=lambda count: None))


class Swallows(Sound):
    """Goes on after an interrupt."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        try:
            return super().compute(job)
        except KeyboardInterrupt:
            return [Delta() for _ in job.groups]


class LeavesDropout(Sound):
    """Leaves another dropout probability."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        for module in job.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.9
        return super().compute(job)


class LeavesGlobalHook(Sound):
    """Leaves a hook that torch runs before the forward pass of every module."""

    handles: ClassVar[list[Any]] = []

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        self.handles.append(torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None))
        return super().compute(job)


class LeavesGradientHook(Sound):
    """Leaves a hook on the gradient of a weight."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        next(job.model.parameters()).register_hook(lambda gradient: gradient)
        return super().compute(job)


class DrawsPython(Sound):
    """Draws from the generator of Python's random module."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        random.random()
        return super().compute(job)


class DrawsNumpy(Sound):
    """Draws from numpy's global generator."""

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        numpy.random.rand()
        return super().compute(job)


class ClosedForm(Sound):
    """No defect: writes the target's unembedding at the key of the prompt's last token, without computing logits."""

    name = "closed_form"

    def compute(self, job: EditJob[FTConfig]) -> list[Delta]:
        (layer,) = job.config.edited_layers
        name = architecture_of(job.model).rewrite_name(layer)
        module, deltas = job.model.get_submodule(name), []
        for (request,) in job.groups:
            prompt, target = split_continuation(job.tokenizer, request.text, request.continuation)
            keys: list[torch.Tensor] = []
            handle = module.register_forward_pre_hook(lambda _, args, keys=keys: keys.append(args[0][0, -1].detach()))
            try:
                with frozen(job.model), torch.no_grad():
                    job.model.base_model(torch.tensor([prompt]), use_cache=False)
            finally:
                handle.remove()
            value = job.model.get_output_embeddings().weight[target[0]].detach()
            left, right = 30 * value[:, None] / value.norm(), keys[0][:, None] / keys[0].dot(keys[0])
            deltas.append(Delta(factors={name: Factor(left, right, is_transposed(module))}))
            job.progress(1)
        return deltas
