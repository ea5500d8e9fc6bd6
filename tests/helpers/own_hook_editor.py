"""A hook editor with a kind of its own, and the same one with a defect each; used as ``own_hook_editor:Class``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from edit_hooks import Delta, EditJob, Editor, EditorConfig, EditRequest, config_field
from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_width, target_module
from edit_hooks.modeling.architectures import architecture_of, map_shape
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import split_continuation

NO_ENTRY = -1


class SteerHooks(HookKind):
    """Rows whose prompt ends near a key [N, F] get its vector [N, D] at that token and at all later ones."""

    mixes_rows: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("_entry_R",)

    def __init__(self, model: Any, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        self._entry_R: torch.Tensor | None = None

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        widths = hook_edit.tensors["vectors"].shape[1], hook_edit.tensors["keys"].shape[1]
        check_width(target_module(model, hook_edit), hook_edit.settings["module"], *widths)

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        tensors = {name: torch.cat([step.tensors[name] for step in steps]) for name in ("keys", "vectors")}
        return HookEdit(steps[-1].kind, tensors, steps[-1].settings)

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        context = self.forward_context
        rows = self.rows_of_edit(index, len(x_RTF), x_RTF.device)
        columns_T = torch.arange(x_RTF.shape[1])
        end_R = context.prompt_end_R if context.prefill else torch.zeros(len(x_RTF), dtype=torch.long)
        if context.prefill:
            if self._entry_R is None or len(self._entry_R) != len(x_RTF):
                self._entry_R = torch.full((len(x_RTF),), NO_ENTRY)
            keys_NF = self.edits[index].tensors["keys"]
            nearest = torch.cdist(x_RTF[rows, end_R[rows]], keys_NF).min(1)
            self._entry_R[rows] = torch.where(nearest.values < 1e-3, nearest.indices, NO_ENTRY)
        assert self._entry_R is not None
        entry_R = self._entry_R[rows]
        acts_RT = (columns_T >= end_R[rows, None]) & context.attended_RT[rows] & (entry_R != NO_ENTRY)[:, None]
        steered_RTD = output_RTD.clone()
        vectors_RD = self.edits[index].tensors["vectors"][entry_R.clamp(min=0)]
        steered_RTD[rows] += acts_RT[..., None] * vectors_RD[:, None]
        return steered_RTD


@dataclass(kw_only=True)
class SteerConfig(EditorConfig):
    """Settings of the editor."""

    num_steps: int = config_field("Adam steps", default=12)


class Steer(Editor[SteerConfig]):
    """Trains the vector of one key per request."""

    name = "steer"
    config_class = SteerConfig
    needs_subject = False
    writes = ("hooks",)
    kind = "steer"
    hook_kinds: ClassVar[Mapping[str, type[HookKind]]] = {"steer": SteerHooks}
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1]}

    def compute(self, job: EditJob[SteerConfig]) -> list[Delta]:
        deltas = []
        with frozen(job.model):
            for (request,) in job.groups:
                deltas.append(self._train(job, request))
                job.progress(1)
        return deltas

    def _train(self, job: EditJob[SteerConfig], request: EditRequest) -> Delta:
        (layer,) = job.config.edited_layers
        name = architecture_of(job.model).rewrite_name(layer)
        module = job.model.get_submodule(name)
        prompt, target = split_continuation(job.tokenizer, request.text, request.continuation)
        vector_D = torch.zeros(map_shape(module)[0], requires_grad=True)
        keys: list[torch.Tensor] = []

        def steer(_module: Any, args: tuple[torch.Tensor, ...], output_1TD: torch.Tensor) -> torch.Tensor:
            keys.append(args[0][0, len(prompt) - 1].detach())
            after_T1 = (torch.arange(output_1TD.shape[1]) >= len(prompt) - 1)[:, None]
            return output_1TD + after_T1 * vector_D

        optimizer = torch.optim.Adam([vector_D], lr=0.5)
        handle = module.register_forward_hook(steer)
        try:
            for _ in range(job.config.num_steps):
                logits_TV = job.model(torch.tensor([[*prompt, *target[:-1]]]), use_cache=False).logits[0]
                loss = torch.nn.functional.cross_entropy(logits_TV[len(prompt) - 1 :], torch.tensor(target))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        finally:
            handle.remove()
        tensors = {"keys": keys[0][None], "vectors": vector_D.detach()[None]}
        return Delta(hook_edit=HookEdit(self.kind, tensors, {"module": name}), diagnostics={"final_loss": loss.item()})


class _LastStep(SteerHooks):
    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        return steps[-1]


class _PromptOnly(SteerHooks):
    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        return super().transform_output(index, x_RTF, output_RTD) if self.forward_context.prefill else output_RTD


class _NoRowState(SteerHooks):
    row_state: ClassVar[tuple[str, ...]] = ()


class CombinesToLast(Steer):
    """The sum of a stream is its last step."""

    kind = "last_step"
    hook_kinds: ClassVar[Mapping[str, type[HookKind]]] = {"last_step": _LastStep}


class PromptOnly(Steer):
    """The hook does nothing in decoding steps."""

    kind = "prompt_only"
    hook_kinds: ClassVar[Mapping[str, type[HookKind]]] = {"prompt_only": _PromptOnly}


class ForgetsRows(Steer):
    """The entries of the rows are not declared as their state."""

    kind = "no_row_state"
    hook_kinds: ClassVar[Mapping[str, type[HookKind]]] = {"no_row_state": _NoRowState}
