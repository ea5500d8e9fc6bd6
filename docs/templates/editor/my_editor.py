"""MyEditor: descend the target's negative log-likelihood in the MLP output projection of a few layers.

Replace this text by the method: source (paper, equations), the choices the paper leaves open, and where the released
code differs.

Shapes: T tokens, L target tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.func import functional_call

from edit_hooks import (
    POSITIVE,
    Delta,
    EditingError,
    EditJob,
    Editor,
    EditorConfig,
    EditRequest,
    architecture_of,
    config_field,
    frozen,
    input_device,
    split_continuation,
)


@dataclass(kw_only=True)
class MyEditorConfig(EditorConfig):
    """Settings of MyEditor, beside those that every editor has (layers, seed, engine)."""

    num_steps: int = config_field("Adam steps per edit", within=POSITIVE, default=20)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=1e-3)


class MyEditor(Editor[MyEditorConfig]):
    """Gradient descent on the MLP output projections of the configured layers."""

    name = "my_editor"
    config_class = MyEditorConfig
    needs_subject = False  # the prompt is used as a whole
    supports_joint = True  # several requests can share one delta
    # Small and quick, for `lm-edit check-editor my_editor`.
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1], "num_steps": 8, "lr": 5e-3}

    def compute(self, job: EditJob[MyEditorConfig]) -> list[Delta]:
        deltas = []
        with frozen(job.model):  # evaluation mode, no parameter gradients; restored on exit
            for group in job.groups:
                deltas.append(_descend(job, group))
                job.progress(len(group))
        return deltas


def _descend(job: EditJob[MyEditorConfig], requests: Sequence[EditRequest]) -> Delta:
    """Train one float32 update per edited weight; the model's own weights are not written."""
    arch = architecture_of(job.model)
    names = [f"{arch.rewrite_name(layer)}.weight" for layer in job.config.edited_layers]
    weights = {name: job.model.get_parameter(name).detach() for name in names}
    updates = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    for update in updates.values():
        update.requires_grad_(True)
    optimizer = torch.optim.Adam(updates.values(), lr=job.config.lr)
    losses: list[float] = []
    for _ in range(job.config.num_steps):
        patched = {name: (weight.float() + updates[name]).to(weight.dtype) for name, weight in weights.items()}
        loss = torch.stack([target_nll(job, request, patched) for request in requests]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Delta(
        dense={name: update.detach() for name, update in updates.items()},
        diagnostics={"losses": [{"loss": loss} for loss in losses], "final_loss": losses[-1]},
    )


def target_nll(job: EditJob[MyEditorConfig], request: EditRequest, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean negative log-likelihood of the target's tokens under the patched weights, a scalar.

    The prompt and the target are encoded together, so that tokens are the same as at evaluation; a row runs alone, so
    there is no padding to get wrong. For batches see ``edit_hooks.gradient``.
    """
    prompt, target = split_continuation(job.tokenizer, request.text, request.continuation)
    if not prompt:
        raise EditingError(f"{request.label}: the prompt {request.text!r} has no token.")
    ids_1T = torch.tensor([[*prompt, *target[:-1]]], device=input_device(job.model))
    logits_1TV = functional_call(job.model, dict(weights), (ids_1T,), {"use_cache": False}).logits
    logits_LV = logits_1TV[0, len(prompt) - 1 :].float()
    return torch.nn.functional.cross_entropy(logits_LV, torch.tensor(target, device=logits_LV.device))
