"""MyHookEditor: an edit that acts through a hook, a trained vector added to the output of one module.

Delete this file and its lines in pyproject.toml if your edit changes weights.

Shapes: R rows, T tokens, F width of the module's input, D of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from my_editor import MyEditorConfig, target_nll
from torch import nn

from edit_hooks import (
    Delta,
    EditingError,
    EditJob,
    Editor,
    EditRequest,
    HookEdit,
    HookKind,
    Registration,
    StreamGrowth,
    architecture_of,
    check_width,
    frozen,
    hooks,
    map_shape,
    target_module,
)


class MyHooks(HookKind):
    """Adds the vector of an edit at every token of the rows under it."""

    mixes_rows = True  # rows under other edits, and under none, may be in the same batch

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        """Refuse a model of another width, as for a saved edit of another model."""
        module, width_out = target_module(model, hook_edit), len(hook_edit.tensors["vector"])
        check_width(module, hook_edit.settings["module"], width_out, map_shape(module)[1])

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """Steps of a stream as one edit: here their sum."""
        vector_D = torch.stack([step.tensors["vector"] for step in steps]).sum(0)
        return HookEdit(steps[-1].kind, {"vector": vector_D}, steps[-1].settings)

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        rows = self.rows_of_edit(index, len(output_RTD), output_RTD.device)
        changed_RTD = output_RTD.clone()
        changed_RTD[rows] += self.edits[index].tensors["vector"].to(output_RTD)
        return changed_RTD


class MyHookEditor(Editor[MyEditorConfig]):
    """Gradient descent on a vector that is added to the MLP output of one layer."""

    name = "my_hook_editor"
    config_class = MyEditorConfig
    needs_subject = False
    writes = ("hooks",)
    stream_growth = StreamGrowth("the vector of each step: d numbers", "with edits")  # as lm-edit editors prints it
    hook_kinds: ClassVar[Mapping[str, type[HookKind]]] = {"my_hooks": MyHooks}
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1], "num_steps": 12, "lr": 0.3}

    def compute(self, job: EditJob[MyEditorConfig]) -> list[Delta]:
        deltas = []
        with frozen(job.model):
            for (request,) in job.groups:
                deltas.append(_train(job, request))
                job.progress(1)
        return deltas


def _train(job: EditJob[MyEditorConfig], request: EditRequest) -> Delta:
    layers = job.config.edited_layers
    if len(layers) != 1:
        raise EditingError(f"my_hook_editor changes the output of one layer, but 'layers' is {layers}; name one.")
    name = architecture_of(job.model).rewrite_name(layers[0])
    module = job.model.get_submodule(name)
    vector_D = torch.zeros(map_shape(module)[0], device=module.weight.device, requires_grad=True)
    optimizer = torch.optim.Adam([vector_D], lr=job.config.lr)
    with hooks(Registration(module, lambda _module, _args, output: output + vector_D.to(output.dtype))):
        for _ in range(job.config.num_steps):
            loss = target_nll(job, request, {})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    edit = HookEdit("my_hooks", {"vector": vector_D.detach()}, {"module": name})
    return Delta(hook_edit=edit, diagnostics={"final_loss": float(loss.detach())})
