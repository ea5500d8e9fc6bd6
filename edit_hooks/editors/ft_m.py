"""FT-M: fine-tune one MLP projection on the target tokens.

The text is ``prompt + " " + target_new``; the loss is the mean over requests of the mean over a request's target
tokens (``objective: last_token`` is FT-L, see ``ft_l.py``). Adam; a chunk whose loss is below ``early_stop_loss`` is
not stepped, and the run stops when the mean loss of a pass is. With ``norm_constraint`` the weights stay in an
l-infinity ball around their initial values. This is the FT of the editing frameworks with the objective on the target
tokens, as used in "The Mirage of Model Editing". Target positions come from the encoding, so the padding side does not
matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.gradient.diagnostics import loss_diagnostics
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
from edit_hooks.modeling.architectures import architecture_of, is_transposed, linear_of, weight_of
from edit_hooks.modeling.hooks import forward_replaced, frozen
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.numbers import NON_NEGATIVE, POSITIVE


@dataclass(kw_only=True)
class FTConfig(EditorConfig):
    """Settings of fine-tuning MLP output projections."""

    objective: Objective = config_field(
        "labels of the loss; target_tokens: each target token, predicted from those before it; last_token: all target "
        "tokens, predicted at the prompt's last token",
        default="target_tokens",
    )
    num_steps: int = config_field("passes over the requests", within=POSITIVE, default=25)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=5e-4)
    weight_decay: float = config_field("Adam's L2 penalty", within=NON_NEGATIVE, default=0.0)
    norm_constraint: float | None = config_field(
        "radius of the l-infinity ball around the initial weights; null: none", within=POSITIVE, default=None
    )
    batch_size: int = config_field("requests per step of a joint edit", within=POSITIVE, default=8)
    early_stop_loss: float = config_field("stop when the mean loss of a pass falls below this", default=1e-2)
    train_bias: bool = config_field("also train the bias where the module has one", default=True)
    append_eos: bool = config_field("append the end-of-text token to the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.append_eos and self.objective == "last_token":
            raise EditingError(
                "append_eos=true with objective=last_token would train the end of the text right after the prompt; use "
                "it with objective=target_tokens."
            )


FTConfigT = TypeVar("FTConfigT", bound=FTConfig)


class FineTuningEditor(Editor[FTConfigT]):
    """Fine-tuning of rewrite modules; base of FT-M and FT-L."""

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
        names = [arch.rewrite_name(layer) for layer in config.edited_layers]
        trained = _MasterCopies(model, names, config.train_bias)
        chunks = [
            self._chunk(job, requests[start : start + config.batch_size])
            for start in range(0, len(requests), config.batch_size)
        ]
        optimizer = torch.optim.Adam(trained.leaves.values(), lr=config.lr, weight_decay=config.weight_decay)
        losses: list[float] = []
        num_steps = 0
        with trained.used_by_model(), torch.enable_grad():
            for _ in range(config.num_steps):
                total = 0.0
                for chunk in chunks:
                    loss = mean_over_rows(label_nll(model, chunk), chunk)
                    total += float(loss.detach()) * len(chunk.ids_RT)
                    if float(loss.detach()) >= config.early_stop_loss:
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        num_steps += 1
                    trained.project(config.norm_constraint)
                losses.append(total / len(requests))
                if losses[-1] < config.early_stop_loss:
                    break
        stopped_early = losses[-1] < config.early_stop_loss
        return trained.delta(loss_diagnostics(losses, num_steps, stopped_early=stopped_early))

    def _chunk(self, job: EditJob[FTConfigT], requests: list[EditRequest]) -> LabeledRows:
        chunk = batch_rows(job.model, [self.row(job.tokenizer, request, job.config) for request in requests])
        if job.config.engine == "fast":
            cache_lower_blocks(job.model, chunk, min(job.config.edited_layers))
        return chunk

    def row(self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: FTConfigT) -> LabeledRow:
        """Hook: the row a request is trained on."""
        return target_row(tokenizer, request.text, request.continuation, config.objective, config.append_eos)


class FTM(FineTuningEditor[FTConfig]):
    """Fine-tuning of MLP output projections on the target tokens."""

    name = "ft_m"
    config_class = FTConfig
    config_folders = ("ft_m",)
    contract_settings: ClassVar[Settings] = {"layers": [1], "num_steps": 8, "lr": 5e-3}


class _MasterCopies:
    """Float32 copies of the trained parameters, used by the modules in training."""

    def __init__(self, model: nn.Module, module_names: list[str], train_bias: bool) -> None:
        self.modules = {name: linear_of(model.get_submodule(name)) for name in module_names}
        self.start: dict[str, torch.Tensor] = {}
        for name, module in self.modules.items():
            self.start[f"{name}.weight"] = at_least_float32(weight_of(module).detach()).clone()
            bias = getattr(module, "bias", None)
            if train_bias and bias is not None:
                self.start[f"{name}.bias"] = at_least_float32(bias.detach()).clone()
        self.leaves = {name: tensor.clone().requires_grad_(True) for name, tensor in self.start.items()}

    @contextlib.contextmanager
    def used_by_model(self) -> Iterator[None]:
        """Compute with the copies inside the scope; the parameters do not change."""
        with contextlib.ExitStack() as scope:
            for name, module in self.modules.items():
                scope.enter_context(forward_replaced(module, self._forward(name, module)))
            yield

    def _forward(self, name: str, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = self.leaves[f"{name}.weight"]
        bias = self.leaves.get(f"{name}.bias", getattr(module, "bias", None))
        transposed = is_transposed(module)

        def forward(x: torch.Tensor) -> torch.Tensor:
            offset = None if bias is None else at_least_float32(bias)
            return nn.functional.linear(at_least_float32(x), weight.T if transposed else weight, offset).to(x.dtype)

        return forward

    @torch.no_grad()
    def project(self, radius: float | None) -> None:
        """Clip every entry to the l-infinity ball around its initial value."""
        if radius is not None:
            for name, leaf in self.leaves.items():
                leaf.copy_(torch.minimum(torch.maximum(leaf, self.start[name] - radius), self.start[name] + radius))

    def delta(self, diagnostics: dict[str, Any]) -> Delta:
        """The change of the parameters since the start."""
        dense = {name: leaf.detach() - self.start[name] for name, leaf in self.leaves.items()}
        ratio = _total_norm(dense.values()) / _total_norm(self.start.values())
        return Delta(dense=dense, diagnostics={**diagnostics, "update_norm_ratio": ratio})


def _total_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Frobenius norm of all tensors together."""
    return sum(float(tensor.norm()) ** 2 for tensor in tensors) ** 0.5
