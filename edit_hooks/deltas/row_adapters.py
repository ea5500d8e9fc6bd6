"""Low-rank edits as per-row adapters: prompts of different edits share a forward pass, and no weight is written.

Design: docs/explain/design/per-row-adapters.md.

Rows of one edit share its factors: they are held once, and multiplied with all tokens of these rows. A CPU takes one
pair of batched products for every number of rows that factors have. On a GPU the start of an operation costs more than
some padding, so there are only a few pairs, mostly one, and no operation per edit.

Shapes: R rows, U distinct factors, M rows of some of them, T and N tokens, F and D input and output width of an edited
map, K rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.modeling.adapter_layers import require_additive
from edit_hooks.modeling.architectures import edited_module, linear_of, unwrapped, weight_of
from edit_hooks.modeling.device.run_ahead import runs_ahead, upload
from edit_hooks.modeling.hooks import Registration, hooks
from edit_hooks.modeling.linear_maps import is_linear_map
from edit_hooks.modeling.weights import check_weights
from edit_hooks.utils.errors import EditingError

MOST_PLACES = 3  # of a single padded share, per row


class _Share(NamedTuple):
    """Distinct factors that as many rows each share, in one batch of matrix products.

    Attributes:
        left_UDK, right_UFK: the factors; views of the stack.
        rows_M: their rows, those of one factor adjacent; ``None`` if they are all rows of the batch in order.
    """

    left_UDK: torch.Tensor
    right_UFK: torch.Tensor
    rows_M: torch.Tensor | None


class _PaddedShares(NamedTuple):
    """Distinct factors in few batches of matrix products; those of a batch have as many rows, some of them padding.

    Attributes:
        shares: with the row of every place.
        place_R: the place of every row in the updates of all shares, one share after another; 0 without a factor.
        bare_R11: whether a row has none; ``None`` if all have one.
    """

    shares: list[_Share]
    place_R: torch.Tensor
    bare_R11: torch.Tensor | None


@dataclass(frozen=True)
class _StackedFactors:
    """The distinct factors of a batch at one module, zero-padded to the largest rank.

    Attributes:
        left_UDK, right_UFK: sorted by the number of their rows.
        factor_of_row: index of each row's factor, -1 for rows without one.
    """

    module: nn.Module
    left_UDK: torch.Tensor
    right_UFK: torch.Tensor
    factor_of_row: Sequence[int]

    def select(self, rows: Sequence[int]) -> _StackedFactors:
        """The factors of some rows; the tensors are shared if all stay in their order."""
        factor_of_row = [self.factor_of_row[row] for row in rows]
        order, factor_of_row = _by_number_of_rows(factor_of_row)
        left_UDK, right_UFK = self.left_UDK, self.right_UFK
        if order != list(range(len(left_UDK))):
            index_U = upload(torch.tensor(order, dtype=torch.long), left_UDK.device)
            left_UDK, right_UFK = left_UDK[index_U], right_UFK[index_U]
        return _StackedFactors(self.module, left_UDK, right_UFK, factor_of_row)

    @functools.cached_property
    def shares(self) -> list[_Share]:
        """The factors by their number of rows; made once for all passes."""
        shares, start = [], 0
        for _, same in itertools.groupby(self._rows_of_factor(), key=len):
            members = list(same)
            end = start + len(members)
            rows = [row for rows in members for row in rows]
            is_all = rows == list(range(len(self.factor_of_row)))
            rows_M = None if is_all else self._index(rows)
            shares.append(_Share(self.left_UDK[start:end], self.right_UFK[start:end], rows_M))
            start = end
        return shares

    @functools.cached_property
    def padded_shares(self) -> _PaddedShares:
        """The factors in one share if that adds few places, else in one per power of two of the number of rows."""
        rows_of_factor = self._rows_of_factor()  # most rows first
        widest, num_rows = len(rows_of_factor[0]), sum(map(len, rows_of_factor))
        is_one = len(rows_of_factor) * widest <= MOST_PLACES * num_rows
        shares, start, places = [], 0, [-1] * len(self.factor_of_row)
        num_places = 0
        for _, same in itertools.groupby(rows_of_factor, key=lambda rows: is_one or (len(rows) - 1).bit_length()):
            members = list(same)
            end, width = start + len(members), len(members[0])
            row_of_place: list[int] = []
            for rows in members:
                for position, row in enumerate(rows):
                    places[row] = num_places + len(row_of_place) + position
                row_of_place += rows + rows[:1] * (width - len(rows))
            num_places += len(row_of_place)
            is_all = row_of_place == list(range(len(self.factor_of_row)))
            rows_M = None if is_all else self._index(row_of_place)
            shares.append(_Share(self.left_UDK[start:end], self.right_UFK[start:end], rows_M))
            start = end
        bare_R11 = self._index(self.factor_of_row)[:, None, None] < 0 if -1 in places else None
        return _PaddedShares(shares, self._index([max(place, 0) for place in places]), bare_R11)

    def _rows_of_factor(self) -> list[list[int]]:
        rows_of_factor: list[list[int]] = [[] for _ in self.left_UDK]
        for row, factor in enumerate(self.factor_of_row):
            if factor >= 0:
                rows_of_factor[factor].append(row)
        return rows_of_factor

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return upload(torch.tensor(numbers), self.left_UDK.device)


class PerRowAdapters:
    """Low-rank updates of the rows of a batch: ``y_row += left_row right_row^T x``.

    A context manager that registers and removes the hooks of all edited modules. Sums are formed in at least float32
    and rounded once. Outputs of rows without an edit (``None``) do not change.

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
        self._adapters = [_stacked(edited_module(inner, name), name, deltas) for name in names]
        self._scope: contextlib.AbstractContextManager[None] | None = None

    def select(self, rows: torch.Tensor) -> PerRowAdapters:
        """The adapters of some rows of the batch, in the order of ``rows``."""
        selected = copy.copy(self)
        selected._scope = None
        kept = rows.tolist()
        selected._adapters = [adapter.select(kept) for adapter in self._adapters]
        return selected

    def registrations(self) -> list[Registration]:
        """New hooks of all edited modules."""
        in_use = [adapter for adapter in self._adapters if len(adapter.left_UDK)]  # a selection may have lost all rows
        return [Registration(adapter.module, _adapter_hook(adapter)) for adapter in in_use]

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


def _require_linear(module: nn.Module, name: str) -> None:
    """Refuse modules beside which an update cannot act per row."""
    check_weights(linear_of(module), name)
    if not is_linear_map(module):
        raise EditingError(f"{name} is a {type(module).__name__}, beside which no update acts per row; write the edit.")
    require_additive(module, name)


def _stacked(module: nn.Module, name: str, deltas: Sequence[Delta | None]) -> _StackedFactors:
    _require_linear(module, name)
    weight = weight_of(module)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    factor_of_row, distinct = _distinct([delta.factors.get(name) if delta is not None else None for delta in deltas])
    order, factor_of_row = _by_number_of_rows(factor_of_row)
    factors = [distinct[index] for index in order]
    rank = max(factor.left.shape[1] for factor in factors)
    # many small copies to a GPU take longer than one
    devices = {factor.left.device for factor in factors}
    device = devices.pop() if len(devices) == 1 else weight.device

    def stacked(sides: Sequence[torch.Tensor]) -> torch.Tensor:
        padded = [side.to(device, dtype) for side in sides]
        padded = [
            nn.functional.pad(side, (0, rank - side.shape[1])) if side.shape[1] < rank else side for side in padded
        ]
        return torch.stack(padded).to(weight.device)

    left_UDK, right_UFK = stacked([factor.left for factor in factors]), stacked([factor.right for factor in factors])
    return _StackedFactors(module, left_UDK, right_UFK, factor_of_row)


def _distinct(factors: Sequence[Factor | None]) -> tuple[list[int], list[Factor]]:
    """Index of each row's factor, -1 without one, and the factors; rows share one if its tensors are the same."""
    index_of: dict[tuple[int, int], int] = {}
    factor_of_row: list[int] = []
    distinct: list[Factor] = []
    for factor in factors:
        if factor is None:
            factor_of_row.append(-1)
            continue
        identity = id(factor.left), id(factor.right)
        if identity not in index_of:
            index_of[identity] = len(distinct)
            distinct.append(factor)
        factor_of_row.append(index_of[identity])
    return factor_of_row, distinct


def _by_number_of_rows(factor_of_row: Sequence[int]) -> tuple[list[int], list[int]]:
    """The factors that have rows, those with most rows first and then by their first row, and the rows' new indices."""
    counts = Counter(factor for factor in factor_of_row if factor >= 0)  # in the order of their first rows
    order = sorted(counts, key=lambda factor: -counts[factor])
    position = {factor: index for index, factor in enumerate(order)}
    return order, [position.get(factor, -1) for factor in factor_of_row]


def _adapter_hook(
    adapter: _StackedFactors,
) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    if runs_ahead(adapter.left_UDK.device):
        return _padded_hook(adapter.padded_shares)
    shares = adapter.shares
    dtype = adapter.left_UDK.dtype

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x_RTF = args[0]
        if len(shares) == 1 and shares[0].rows_M is None:
            return (output.to(dtype) + _update(shares[0], x_RTF)).to(output.dtype)
        result_RTD = output.to(dtype, copy=True)
        for share in shares:
            assert share.rows_M is not None
            result_RTD.index_add_(0, share.rows_M, _update(share, x_RTF[share.rows_M]))
        return result_RTD.to(output.dtype)

    return hook


def _padded_hook(
    padded: _PaddedShares,
) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    shares, place_R, bare_R11 = padded

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x_RTF = args[0]
        updates = [_update(share, x_RTF if share.rows_M is None else x_RTF[share.rows_M]) for share in shares]
        if len(shares) == 1 and shares[0].rows_M is None:
            update_RTD = updates[0]
        else:
            update_RTD = (updates[0] if len(updates) == 1 else torch.cat(updates))[place_R]
        if bare_R11 is not None:
            update_RTD = update_RTD.masked_fill(bare_R11, 0)
        return (output + update_RTD).to(output.dtype)  # the sum is in the wider of both types

    return hook


def _update(share: _Share, x_MTF: torch.Tensor) -> torch.Tensor:
    """Change of the outputs of the share's rows [M, T, D]."""
    num_factors, width_out, _ = share.left_UDK.shape
    x_UNF = x_MTF.to(share.right_UFK.dtype).reshape(num_factors, -1, x_MTF.shape[-1])
    update_UND = torch.bmm(torch.bmm(x_UNF, share.right_UFK), share.left_UDK.mT)
    return update_UND.view(*x_MTF.shape[:-1], width_out)
