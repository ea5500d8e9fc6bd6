"""TODO: say what is here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.modeling.architectures import map_shape, unwrapped, weight_of
from edit_hooks.utils.errors import EditingError


class PerRowAdapters:
    """Gives every row of a batch its own low-rank update: ``y_row += (x . right_row) left_row`` at each edited module.

    Nothing is patched, so prompts of different edits share one forward pass, and leaving the scope is all the undoing.
    Rows without an edit (``None``) get zeros.
    """

    def __init__(self, model: nn.Module, deltas: list[Delta | None]) -> None:
        inner = unwrapped(model)
        for delta in deltas:
            if delta is not None and (delta.dense or delta.masks):
                raise EditingError("only low-rank edits can act per row; apply this one with edited(model, delta).")
        names = sorted({name for delta in deltas if delta is not None for name in delta.factors})
        self._adapters: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
        for name in names:
            module = inner.get_submodule(name)
            left, right = self._stack(module, name, deltas)
            self._adapters.append((module, left, right))

    def select(self, rows: torch.Tensor) -> PerRowAdapters:
        """The adapters of some rows of the batch, in the given order."""
        chosen = object.__new__(PerRowAdapters)
        chosen._adapters = [
            (module, left[rows.to(left.device)], right[rows.to(right.device)]) for module, left, right in self._adapters
        ]
        return chosen

    @staticmethod
    def _stack(module: nn.Module, name: str, deltas: list[Delta | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of all rows at one module, zero-padded to the largest rank: [rows, d, r] and [rows, f, r]."""
        weight = weight_of(module)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        width_out, width_in = map_shape(module)
        factors = [delta.factors.get(name) if delta is not None else None for delta in deltas]
        rank = max(factor.left.shape[1] for factor in factors if factor is not None)
        left = torch.zeros(len(deltas), width_out, rank, dtype=dtype, device=weight.device)
        right = torch.zeros(len(deltas), width_in, rank, dtype=dtype, device=weight.device)
        for row, factor in enumerate(factors):
            if factor is not None:
                left[row, :, : factor.left.shape[1]] = factor.left.to(left)
                right[row, :, : factor.right.shape[1]] = factor.right.to(right)
        return left, right

    def __enter__(self) -> PerRowAdapters:
        self._handles = []
        for module, left, right in self._adapters:

            def hook(_module: nn.Module, args: Any, output: torch.Tensor, left=left, right=right) -> torch.Tensor:  # type: ignore[no-untyped-def]
                x = args[0]
                coefficients = torch.einsum("btf,bfr->btr", x.to(right.dtype), right)
                return (output.to(left.dtype) + torch.einsum("btr,bdr->btd", coefficients, left)).to(output.dtype)

            self._handles.append(module.register_forward_hook(hook))
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()
