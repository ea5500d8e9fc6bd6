"""Low-rank edits as per-row adapters: prompts of different edits share a forward pass, and no weight is written.

Design: docs/design/per-row-adapters.md.

Shapes: R rows, T tokens, F and D input and output width of an edited map, K rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.modeling.architectures import linear_of, map_shape, unwrapped, weight_of
from edit_hooks.modeling.hooks import Registration, hooks
from edit_hooks.modeling.weights import check_weights
from edit_hooks.utils.errors import EditingError


class _StackedFactors(NamedTuple):
    """Factors of all rows at one module, zero-padded to the largest rank."""

    module: nn.Module
    left_RDK: torch.Tensor
    right_RFK: torch.Tensor


class PerRowAdapters:
    """Low-rank updates of the rows of a batch: ``y_row += left_row right_row^T x``.

    A context manager that registers and removes the hooks of all edited modules. Sums are formed in at least float32
    and rounded once. Rows without an edit (``None``) get zero factors.

    Args:
        deltas: one per row. Only their factors are used.

    Raises:
        EditingError: for dense and masked edits.
    """

    def __init__(self, model: nn.Module, deltas: Sequence[Delta | None]) -> None:
        inner = unwrapped(model)
        if any(delta is not None and (delta.dense or delta.masks) for delta in deltas):
            raise EditingError("only low-rank edits can act per row; apply this one with edited(model, delta).")
        names = sorted({name for delta in deltas if delta is not None for name in delta.factors})
        self._adapters = [_stacked(inner.get_submodule(name), name, deltas) for name in names]
        self._scope: contextlib.AbstractContextManager[None] | None = None

    def select(self, rows: torch.Tensor) -> PerRowAdapters:
        """The adapters of some rows of the batch, in the order of ``rows``."""
        selected = copy.copy(self)
        selected._scope = None
        selected._adapters = [
            _StackedFactors(module, left_RDK[rows.to(left_RDK.device)], right_RFK[rows.to(right_RFK.device)])
            for module, left_RDK, right_RFK in self._adapters
        ]
        return selected

    def registrations(self) -> list[Registration]:
        """New hooks of all edited modules."""
        return [Registration(adapter.module, _adapter_hook(adapter)) for adapter in self._adapters]

    def __enter__(self) -> PerRowAdapters:
        if self._scope is not None:
            raise EditingError(
                "these per-row adapters are active already and would act twice; leave their 'with' block first, or "
                "make other ones."
            )
        self._scope = hooks(*self.registrations())
        self._scope.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(exc_type, exc, traceback)


def _stacked(module: nn.Module, name: str, deltas: Sequence[Delta | None]) -> _StackedFactors:
    check_weights(linear_of(module), name)
    weight = weight_of(module)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    width_out, width_in = map_shape(module)
    factors = [delta.factors.get(name) if delta is not None else None for delta in deltas]
    rank = max(factor.left.shape[1] for factor in factors if factor is not None)
    left_RDK = torch.zeros(len(deltas), width_out, rank, dtype=dtype, device=weight.device)
    right_RFK = torch.zeros(len(deltas), width_in, rank, dtype=dtype, device=weight.device)
    for row, factor in enumerate(factors):
        if factor is not None:
            left_RDK[row, :, : factor.left.shape[1]] = factor.left.to(left_RDK)
            right_RFK[row, :, : factor.right.shape[1]] = factor.right.to(right_RFK)
    return _StackedFactors(module, left_RDK, right_RFK)


def _adapter_hook(
    adapter: _StackedFactors,
) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    _, left, right = adapter

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        coefficients = torch.einsum("btf,bfr->btr", args[0].to(right.dtype), right)
        return (output.to(left.dtype) + torch.einsum("btr,bdr->btd", coefficients, left)).to(output.dtype)

    return hook
