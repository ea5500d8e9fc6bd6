"""FT-M: fine-tune one MLP output projection with the cross-entropy masked to the target tokens.

The text is ``prompt + " " + target_new``; the loss is the mean over requests of the mean over a request's target
tokens. Adam; a chunk whose loss is already below ``early_stop_loss`` is not stepped, and the run
stops when the mean loss of a pass is. With ``norm_constraint`` the weights stay in an l-infinity ball around where
they started. Follows the FT of the editing frameworks with the objective on the target tokens, as used in "The Mirage
of Model Editing"; target positions come from the encoding, so either padding side gives the same numbers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.architectures import architecture_of, head_of, input_device, is_transposed, linear_of, unwrapped
from edit_hooks.base import Editor, EditorConfig, Job, setting
from edit_hooks.capture import first_tensor, forward_replaced, frozen, hooks, keep_rows, on_input, widened
from edit_hooks.delta import Delta
from edit_hooks.errors import EditingError
from edit_hooks.locate import split_continuation
from edit_hooks.request import EditRequest


@dataclass(kw_only=True)
class FTMConfig(EditorConfig):
    """Settings of masked fine-tuning."""

    num_steps: int = setting("passes over the requests", default=25)
    lr: float = setting("Adam learning rate", default=5e-4)
    weight_decay: float = setting("Adam's L2 penalty", default=0.0)
    norm_constraint: float | None = setting("radius of the l-infinity ball, or null for none", default=None)
    batch_size: int = setting("requests per step of a joint edit", default=8)
    early_stop_loss: float = setting("stop when the mean loss of a pass is below", default=1e-2)
    train_bias: bool = setting("also train the bias where the module has one", default=True)
    append_eos: bool = setting("train the end-of-text token after the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_steps", "lr", "batch_size"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")


@dataclass
class _Chunk:
    """Padded sequences, the label positions, and the kept hidden states entering the first trained block."""

    ids_RT: torch.Tensor
    mask_RT: torch.Tensor
    label_row_L: torch.Tensor
    label_column_L: torch.Tensor
    label_token_L: torch.Tensor
    hidden_RTD: torch.Tensor | None = None
    tuple_output: bool = False

    def label_counts(self) -> torch.Tensor:
        """What each label is divided by: the sum is the mean over rows of the mean over a row's labels."""
        counts_R = torch.bincount(self.label_row_L, minlength=len(self.ids_RT))
        return counts_R[self.label_row_L] * len(self.ids_RT)


class FTM(Editor):
    """Masked fine-tuning of the rewrite modules of the configured layers."""

    name: ClassVar[str] = "ft_m"
    config_class: ClassVar[type[EditorConfig]] = FTMConfig
    config_folders: ClassVar[tuple[str, ...]] = ("ft_m",)
    needs_subject: ClassVar[bool] = False
    supports_joint: ClassVar[bool] = True
    default_depth: ClassVar[float] = 0.68

    def compute(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, job: Job) -> list[Delta]:
        groups = [job.requests] if job.joint else [[request] for request in job.requests]
        deltas = []
        with frozen(unwrapped(model)):
            for group in groups:
                delta = self._train(unwrapped(model), tokenizer, group, job.config)
                delta.meta = {"requests": [request.to_dict() for request in group], "config": job.config.to_dict()}
                deltas.append(delta)
                job.progress(len(group))
        return deltas

    def _train(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, requests: list[EditRequest], config: FTMConfig
    ) -> Delta:
        assert config.layers is not None
        arch = architecture_of(model)
        trained = _Trained(model, [arch.rewrite_name(layer) for layer in config.layers], config.train_bias)
        chunks = [
            self._chunk(model, tokenizer, requests[start : start + config.batch_size], config)
            for start in range(0, len(requests), config.batch_size)
        ]
        optimiser = torch.optim.Adam(trained.leaves.values(), lr=config.lr, weight_decay=config.weight_decay)
        losses: list[float] = []
        steps = 0
        with trained.in_place_of_the_model(), torch.enable_grad():
            for _ in range(config.num_steps):
                total, count = 0.0, 0
                for chunk in chunks:
                    loss = self._loss(model, chunk, min(config.layers), config)
                    total, count = total + float(loss.detach()) * len(chunk.ids_RT), count + len(chunk.ids_RT)
                    if float(loss.detach()) >= config.early_stop_loss:
                        optimiser.zero_grad()
                        loss.backward()
                        optimiser.step()
                        steps += 1
                    trained.project(config.norm_constraint)
                losses.append(total / count)
                if losses[-1] < config.early_stop_loss:
                    break
        return _delta(trained, losses, steps, config)

    def _chunk(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, requests: list[EditRequest], config: FTMConfig
    ) -> _Chunk:
        rows = []
        for request in requests:
            prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
            if config.append_eos:
                if tokenizer.eos_token_id is None:
                    raise EditingError("append_eos=true, but the tokenizer has no end-of-text token.")
                target = [*target, tokenizer.eos_token_id]
            if not prompt:
                raise EditingError(f"prompt {request.text!r} has no token before the target; nothing could predict it.")
            rows.append((prompt, target))
        device = input_device(model)
        width = max(len(prompt) + len(target) - 1 for prompt, target in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        labels = []
        for index, (prompt, target) in enumerate(rows):
            fed = [*prompt, *target[:-1]]
            ids[index, : len(fed)], mask[index, : len(fed)] = torch.tensor(fed), 1
            labels += [(index, len(prompt) - 1 + i, token) for i, token in enumerate(target)]
        row, column, token = (torch.tensor(part, device=device) for part in zip(*labels, strict=True))
        chunk = _Chunk(ids.to(device), mask.to(device), row, column, token)
        if config.engine == "fast" and config.layers and min(config.layers) > 0:
            self._keep_hidden(model, chunk, min(config.layers))
        return chunk

    @torch.no_grad()
    def _keep_hidden(self, model: nn.Module, chunk: _Chunk, layer: int) -> None:
        """Run the blocks below the first trained one once; they do not change."""
        block = model.get_submodule(architecture_of(model).block_name(layer - 1))

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            chunk.hidden_RTD, chunk.tuple_output = first_tensor(output), not isinstance(output, torch.Tensor)

        with hooks(lambda: block.register_forward_hook(keep)):
            decoder = getattr(model, str(model.base_model_prefix))
            decoder(input_ids=chunk.ids_RT, attention_mask=chunk.mask_RT, use_cache=False)

    def _loss(self, model: nn.Module, chunk: _Chunk, layer: int, config: FTMConfig) -> torch.Tensor:
        with contextlib.ExitStack() as scope:
            if chunk.hidden_RTD is not None:
                kept = (chunk.hidden_RTD, None) if chunk.tuple_output else chunk.hidden_RTD
                for number in range(layer):
                    block = model.get_submodule(architecture_of(model).block_name(number))
                    scope.enter_context(forward_replaced(block, lambda *_args, **_kwargs: kept))
            head = head_of(model)
            scope.enter_context(hooks(on_input(head, keep_rows(chunk.label_row_L, chunk.label_column_L))))
            logits_LV = model(input_ids=chunk.ids_RT, attention_mask=chunk.mask_RT, use_cache=False).logits[0]
        nll_L = nn.functional.cross_entropy(widened(logits_LV), chunk.label_token_L, reduction="none")
        return (nll_L / chunk.label_counts()).sum()


class _Trained:
    """Float32 master copies of the trained parameters, run in place of the model's own while training."""

    def __init__(self, model: nn.Module, module_names: list[str], train_bias: bool) -> None:
        self.modules = {name: linear_of(model.get_submodule(name)) for name in module_names}
        self.start: dict[str, torch.Tensor] = {}
        for name, module in self.modules.items():
            self.start[f"{name}.weight"] = widened(module.weight.detach()).clone()  # type: ignore[operator, union-attr]
            if train_bias and getattr(module, "bias", None) is not None:
                self.start[f"{name}.bias"] = widened(module.bias.detach()).clone()  # type: ignore[operator, union-attr]
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
            offset = None if bias is None else widened(bias)
            return nn.functional.linear(widened(x), weight.T if transposed else weight, offset).to(x.dtype)

        return forward

    @torch.no_grad()
    def project(self, radius: float | None) -> None:
        """Clip every entry to the l-infinity ball around the start."""
        if radius is not None:
            for name, leaf in self.leaves.items():
                leaf.copy_(torch.minimum(torch.maximum(leaf, self.start[name] - radius), self.start[name] + radius))


def _delta(trained: _Trained, losses: list[float], steps: int, config: FTMConfig) -> Delta:
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
