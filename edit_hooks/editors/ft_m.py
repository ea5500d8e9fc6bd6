"""FT-M: fine-tune one MLP output projection with the cross-entropy masked to the target tokens.

The text is ``prompt + " " + target_new``; the loss is the mean over requests of the mean over a request's target
tokens (``objective: last_token`` is FT-L, see ``ft_l.py``). Adam; a chunk whose loss is already below
``early_stop_loss`` is not stepped, and the run stops when the mean loss of a pass is. With ``norm_constraint`` the
weights stay in an l-infinity ball around where they started. Follows the FT of the editing frameworks with the
objective on the target tokens, as used in "The Mirage of Model Editing"; target positions come from the encoding, so
either padding side gives the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.gradient.labeled_rows import (
    LabeledRow,
    LabeledRows,
    Objective,
    batch_rows,
    cache_lower_blocks,
    label_nll,
    mean_over_rows,
    target_row,
)
from edit_hooks.modeling.architectures import architecture_of, is_transposed, linear_of
from edit_hooks.modeling.hooks import forward_replaced, frozen
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError


@dataclass(kw_only=True)
class FTConfig(EditorConfig):
    """Settings of fine-tuning MLP output projections."""

    objective: Objective = config_field(
        "target_tokens: cross-entropy of each target token after those before it; last_token: of all target tokens "
        "at the prompt's last token",
        default="target_tokens",
    )
    num_steps: int = config_field("passes over the requests", default=25)
    lr: float = config_field("Adam learning rate", default=5e-4)
    weight_decay: float = config_field("Adam's L2 penalty", default=0.0)
    norm_constraint: float | None = config_field("radius of the l-infinity ball, or null for none", default=None)
    batch_size: int = config_field("requests per step of a joint edit", default=8)
    early_stop_loss: float = config_field("stop when the mean loss of a pass is below", default=1e-2)
    train_bias: bool = config_field("also train the bias where the module has one", default=True)
    append_eos: bool = config_field("train the end-of-text token after the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_steps", "lr", "batch_size"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")
        if self.norm_constraint is not None and self.norm_constraint <= 0:
            raise EditingError("editor setting 'norm_constraint' is the radius of a ball: a positive number or null.")
        if self.append_eos and self.objective == "last_token":
            raise EditingError(
                "append_eos=true with objective=last_token would ask for the end of the text right after the prompt; "
                "it belongs to objective=target_tokens."
            )


FTConfigT = TypeVar("FTConfigT", bound=FTConfig)


class FineTuningEditor(Editor[FTConfigT]):
    """Fine-tuning of the rewrite modules of the configured layers; base of FT-M and FT-L."""

    needs_subject = False
    supports_joint = True
    default_depth = 0.68

    def compute(self, job: EditJob[FTConfigT]) -> list[Delta]:
        deltas = []
        with frozen(job.model):
            for group in job.groups:
                deltas.append(self._train(job, group))
                job.progress(len(group))
        return deltas

    def _train(self, job: EditJob[FTConfigT], requests: list[EditRequest]) -> Delta:
        model, config = job.model, job.config
        arch = architecture_of(model)
        trained = _Trained(model, [arch.rewrite_name(layer) for layer in config.edited_layers], config.train_bias)
        chunks = [
            self._chunk(job, requests[start : start + config.batch_size])
            for start in range(0, len(requests), config.batch_size)
        ]
        optimizer = torch.optim.Adam(trained.leaves.values(), lr=config.lr, weight_decay=config.weight_decay)
        losses: list[float] = []
        steps = 0
        with trained.in_place_of_the_model(), torch.enable_grad():
            for _ in range(config.num_steps):
                total, count = 0.0, 0
                for chunk in chunks:
                    loss = mean_over_rows(label_nll(model, chunk), chunk)
                    total, count = total + float(loss.detach()) * len(chunk.ids_RT), count + len(chunk.ids_RT)
                    if float(loss.detach()) >= config.early_stop_loss:
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        steps += 1
                    trained.project(config.norm_constraint)
                losses.append(total / count)
                if losses[-1] < config.early_stop_loss:
                    break
        return _delta(trained, losses, steps, config)

    def _chunk(self, job: EditJob[FTConfigT], requests: list[EditRequest]) -> LabeledRows:
        examples = [self.example(job.tokenizer, request, job.config) for request in requests]
        chunk = batch_rows(job.model, examples)
        if job.config.engine == "fast":
            cache_lower_blocks(job.model, chunk, min(job.config.edited_layers))
        return chunk

    def example(self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: FTConfigT) -> LabeledRow:
        """Hook: the row a request is trained on."""
        return target_row(tokenizer, request.text, request.target_new, config.objective, config.append_eos)


class FTM(FineTuningEditor[FTConfig]):
    """Masked fine-tuning of the rewrite modules of the configured layers."""

    name = "ft_m"
    config_class = FTConfig
    config_folders = ("ft_m",)
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1], "num_steps": 8, "lr": 5e-3}


class _Trained:
    """Float32 master copies of the trained parameters, run in place of the model's own while training."""

    def __init__(self, model: nn.Module, module_names: list[str], train_bias: bool) -> None:
        self.modules = {name: linear_of(model.get_submodule(name)) for name in module_names}
        self.start: dict[str, torch.Tensor] = {}
        for name, module in self.modules.items():
            self.start[f"{name}.weight"] = at_least_float32(module.weight.detach()).clone()  # type: ignore[operator, union-attr]
            if train_bias and getattr(module, "bias", None) is not None:
                self.start[f"{name}.bias"] = at_least_float32(module.bias.detach()).clone()  # type: ignore[operator, union-attr]
        self.leaves = {name: tensor.clone().requires_grad_(True) for name, tensor in self.start.items()}

    @contextlib.contextmanager
    def in_place_of_the_model(self) -> Any:
        """Inside, the trained modules compute with the master copies; the model's parameters are not touched."""
        with contextlib.ExitStack() as scope:
            for name, module in self.modules.items():
                scope.enter_context(forward_replaced(module, self._forward(name, module)))
            yield

    def _forward(self, name: str, module: nn.Module) -> Any:
        weight = self.leaves[f"{name}.weight"]
        bias = self.leaves.get(f"{name}.bias", getattr(module, "bias", None))
        transposed = is_transposed(module)

        def forward(x: torch.Tensor) -> torch.Tensor:
            offset = None if bias is None else at_least_float32(bias)
            return nn.functional.linear(at_least_float32(x), weight.T if transposed else weight, offset).to(x.dtype)

        return forward

    @torch.no_grad()
    def project(self, radius: float | None) -> None:
        """Clip every entry to the l-infinity ball around the start."""
        if radius is not None:
            for name, leaf in self.leaves.items():
                leaf.copy_(torch.minimum(torch.maximum(leaf, self.start[name] - radius), self.start[name] + radius))


def _delta(trained: _Trained, losses: list[float], steps: int, config: FTConfig) -> Delta:
    dense = {name: leaf.detach() - trained.start[name] for name, leaf in trained.leaves.items()}
    update = sum(float(tensor.norm()) ** 2 for tensor in dense.values()) ** 0.5
    weight = sum(float(tensor.norm()) ** 2 for tensor in trained.start.values()) ** 0.5
    stopped = losses[-1] < config.early_stop_loss
    return Delta(
        dense=dense,
        diagnostics={
            "final_loss": losses[-1],
            "initial_nll": losses[0],
            "steps": steps,
            "stop_reason": "loss" if stopped else "steps",
            "update_norm_ratio": update / weight,
            "losses": [{"loss": loss} for loss in losses],
        },
    )
