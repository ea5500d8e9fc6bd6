"""Every row of a batch under its own edit: low-rank updates as adapters, hooked edits by their kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from edit_hooks.deltas.apply import require_no_context
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import ForwardContext, HookEdit, HookKind, kind_class
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.modeling.architectures import unwrapped


class RowEdits:
    """The edits of a batch's rows, applied pass by pass; between passes the model is untouched.

    What is decided for a row at prefill (a codebook entry, a memory) is kept for its decoding steps.

    Args:
        deltas: one per row, ``None`` for rows without an edit. Rows under a hooked edit that cannot be mixed must all
            be under the same one.
    """

    def __init__(self, model: nn.Module, deltas: Sequence[Delta | None]) -> None:
        inner = unwrapped(model)
        for delta in deltas:
            if delta is not None:
                require_no_context(delta)
        self._adapters = PerRowAdapters(inner, list(deltas))
        self._num_rows = len(deltas)
        self._device = next(inner.parameters()).device
        self._kinds = [self._kind(inner, kind, deltas) for kind in _kinds(deltas)]

    @staticmethod
    def _kind(model: nn.Module, kind: str, deltas: Sequence[Delta | None]) -> HookKind:
        hook_edit = [delta.hook_edit if delta is not None else None for delta in deltas]
        own = [part if part is not None and part.kind == kind else None for part in hook_edit]
        distinct: dict[int, HookEdit] = {id(part): part for part in own if part is not None}
        numbers = {identity: number for number, identity in enumerate(distinct)}
        edit_of_row = torch.tensor([numbers.get(id(part), -1) for part in own])
        for part in distinct.values():
            part.check(model)
        if not kind_class(kind).mixes_rows:
            assert len(distinct) == 1, f"rows of {len(distinct)} edits of kind {kind} in one batch"
        return kind_class(kind)(model, list(distinct.values()), edit_of_row)

    @contextlib.contextmanager
    def _running(self, now: ForwardContext) -> Iterator[None]:
        with contextlib.ExitStack() as scope:
            scope.enter_context(self._adapters)
            for kind in self._kinds:
                kind.running = now
                scope.enter_context(kind.attached())
            yield

    def prefill(self, mask_RT: torch.Tensor, prompt_length_R: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Scope of the pass over the prompts (and, in teacher forcing, their continuations).

        Args:
            mask_RT: attention mask of this pass.
            prompt_length_R: number of prompt tokens of each row.
        """
        return self._running(ForwardContext.of_prompts(mask_RT, prompt_length_R))

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Scope of a pass over one new token per row."""
        return self._running(ForwardContext.of_step(self._num_rows, self._device))

    def select(self, rows: torch.Tensor) -> RowEdits:
        """The edits of some rows of the batch, in the given order."""
        chosen = object.__new__(RowEdits)
        chosen._adapters = self._adapters.select(rows)
        chosen._kinds = [kind.select(rows) for kind in self._kinds]
        chosen._num_rows, chosen._device = len(rows), self._device
        return chosen


def _kinds(deltas: Sequence[Delta | None]) -> list[str]:
    return sorted({delta.hook_edit.kind for delta in deltas if delta is not None and delta.hook_edit is not None})
