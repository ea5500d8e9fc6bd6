"""Copies of trained parameters: one per edit, so that independent edits train side by side, or of whole blocks.

The rows of edit e pass through copy e; everything else of the model is shared. A copy, its gradient and Adam's two
moments take four times the size of the trained parameters per edit.

Shapes: E edits, N tokens of an edit's rows, f and d input and output width of a map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.placement import parked
from edit_hooks.modeling.architectures import is_transposed, linear_of, weight_of
from edit_hooks.modeling.hooks import forward_replaced
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.scopes import undone


class WeightCopies:
    """Float32 copies of the weights (and biases) of some linear maps.

    Batches must hold the same number of rows for each edit, those of an edit adjacent.

    Attributes:
        leaves: parameter name -> the copies [E, ...], in the stored orientation.
    """

    def __init__(self, model: nn.Module, module_names: Sequence[str], train_bias: bool, num_edits: int = 1) -> None:
        self.modules = {name: linear_of(model.get_submodule(name)) for name in module_names}
        self.start: dict[str, torch.Tensor] = {}
        for name, module in self.modules.items():
            self.start[f"{name}.weight"] = at_least_float32(weight_of(module).detach())
            bias = getattr(module, "bias", None)
            if train_bias and bias is not None:
                self.start[f"{name}.bias"] = at_least_float32(bias.detach())
        self.leaves = {
            name: tensor.repeat(num_edits, *[1] * tensor.dim()).requires_grad_() for name, tensor in self.start.items()
        }

    @property
    def own_start(self) -> list[torch.Tensor]:
        """The initial values that are copies; those of float32 weights are the weights."""
        parameters = [part for module in self.modules.values() for part in module.parameters(recurse=False)]
        places = {parameter.data_ptr() for parameter in parameters}
        return [tensor for tensor in self.start.values() if tensor.data_ptr() not in places]

    @property
    def edit_bytes(self) -> int:
        """Size of one edit's copies."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.start.values())

    @contextlib.contextmanager
    def used_by_model(self) -> Iterator[None]:
        """Compute with the copies inside the scope; the parameters do not change."""
        with contextlib.ExitStack() as scope:
            for name, module in self.modules.items():
                scope.enter_context(forward_replaced(module, self._forward(name, module)))
            yield

    def _forward(self, name: str, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        transposed = is_transposed(module)
        own_bias = getattr(module, "bias", None)

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight_EDF = self.leaves[f"{name}.weight"]
            weight_EFD = weight_EDF if transposed else weight_EDF.mT
            x_ENF = at_least_float32(x).reshape(len(weight_EFD), -1, x.shape[-1])
            if f"{name}.bias" in self.leaves:
                y_END = torch.baddbmm(self.leaves[f"{name}.bias"][:, None], x_ENF, weight_EFD)
            else:
                y_END = torch.bmm(x_ENF, weight_EFD)
                if own_bias is not None:
                    y_END = y_END + at_least_float32(own_bias)
            return y_END.view(*x.shape[:-1], -1).to(x.dtype)

        return forward

    def select(self, keep_E: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Drop finished edits (boolean mask), also from the optimizer."""
        self.leaves = {name: keep_edits(leaf, keep_E, optimizer) for name, leaf in self.leaves.items()}

    @torch.no_grad()
    def project(self, radius: float | None) -> None:
        """Clip every entry to the l-infinity ball around its initial value."""
        if radius is not None:
            for name, leaf in self.leaves.items():
                leaf.clamp_(self.start[name] - radius, self.start[name] + radius)

    def delta(self, edit: int, diagnostics: dict[str, Any]) -> Delta:
        """The change of one edit's parameters since the start.

        Many edits finish before the first of them is stored, and each has the size of the trained parameters: they stay
        on a GPU only while there is room.
        """
        dense = {name: leaf.detach()[edit] - self.start[name] for name, leaf in self.leaves.items()}
        return _delta(dense, self.start, diagnostics)


class BlockCopies:
    """Float32 copies of all parameters of some blocks, for one edit: attention, MLP, norms, biases where there are any.

    Attributes:
        leaves: parameter name -> its copy.
        modules: names of the modules that hold them.
    """

    def __init__(self, model: nn.Module, block_names: Sequence[str]) -> None:
        self.start: dict[str, torch.Tensor] = {}
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self.modules: list[str] = []
        for block in block_names:
            for name, module in model.get_submodule(block).named_modules(prefix=block):
                own = dict(module.named_parameters(recurse=False))
                self.modules += [name] if own else []
                for leaf, parameter in own.items():
                    self.start[f"{name}.{leaf}"] = at_least_float32(parameter.detach())
                    self._owners[f"{name}.{leaf}"] = module, leaf
        self.leaves = {name: tensor.clone().requires_grad_() for name, tensor in self.start.items()}

    @contextlib.contextmanager
    def used_by_model(self) -> Iterator[None]:
        """Compute with the copies inside the scope; the model's own parameters do not change."""
        own = {name: module._parameters[leaf] for name, (module, leaf) in self._owners.items()}

        def restore() -> None:
            for name, (module, leaf) in self._owners.items():
                module.__dict__.pop(leaf, None)
                module._parameters[leaf] = own[name]

        with undone(restore):
            for name, (module, leaf) in self._owners.items():
                module._parameters[leaf] = None  # not deleted: the order of a module's parameters stays
                module.__dict__[leaf] = self.leaves[name].to(getattr(own[name], "dtype", None))
            yield

    def has_matrix(self, name: str) -> bool:
        """Whether the module of a parameter has a matrix; norms have none."""
        owner, _ = self._owners[name]
        return any(self.start[other].dim() > 1 for other, (module, _) in self._owners.items() if module is owner)

    @torch.no_grad()
    def project(self, radius: float | None) -> None:
        """Clip every entry to the l-infinity ball around its initial value."""
        if radius is not None:
            for name, leaf in self.leaves.items():
                leaf.clamp_(self.start[name] - radius, self.start[name] + radius)

    def delta(self, diagnostics: dict[str, Any]) -> Delta:
        """The change of all parameters since the start."""
        return _delta(
            {name: leaf.detach() - self.start[name] for name, leaf in self.leaves.items()}, self.start, diagnostics
        )


def _delta(dense: dict[str, torch.Tensor], start: dict[str, torch.Tensor], diagnostics: dict[str, Any]) -> Delta:
    ratio = _total_norm(dense.values()) / _total_norm(start.values())
    return Delta(dense=parked(dense), diagnostics={**diagnostics, "update_norm_ratio": ratio})


def keep_edits(leaf: torch.Tensor, keep_E: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The leaf [E, ...] of the remaining edits, with gradient and optimizer state, in place of the old one."""
    keep_E = keep_E.to(leaf.device)
    kept = leaf.detach()[keep_E].requires_grad_()
    if leaf.grad is not None:
        kept.grad = leaf.grad[keep_E]
    for group in optimizer.param_groups:
        group["params"] = [kept if parameter is leaf else parameter for parameter in group["params"]]
    # Moments have the shape of the leaf; the step count is a scalar, the same for all edits.
    state = optimizer.state.pop(leaf, {})
    optimizer.state[kept] = {
        name: value[keep_E] if value.shape == leaf.shape else value for name, value in state.items()
    }
    return kept


def _total_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Frobenius norm of all tensors together."""
    return sum(float(tensor.norm()) ** 2 for tensor in tensors) ** 0.5
