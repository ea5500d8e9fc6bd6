"""Every row of a batch under its own edit: low-rank updates as adapters, hook edits by their kind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from edit_hooks.deltas.apply import require_no_context
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit, HookKind, kind_class
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.modeling.architectures import edited_module, head_of, unwrapped
from edit_hooks.modeling.hooks import hooks
from edit_hooks.modeling.linear_maps import is_linear_map
from edit_hooks.modeling.support import rows_can_differ
from edit_hooks.utils.errors import EditingError


def acts_per_row(model: nn.Module, delta: Delta | None) -> bool:
    """Whether an edit acts on single rows of a model's batches; else it is written into the weights.

    The head is computed after the scope of :class:`RowEdits`, for the read positions only, and an embedding reads token
    ids.
    """
    if delta is None:
        return True
    if not delta.acts_per_row:
        return False
    inner = unwrapped(model)
    if delta.factors and not rows_can_differ(inner):
        return False
    modules = [edited_module(inner, name) for name in delta.factors]
    return all(is_linear_map(one) and one is not head_of(inner) for one in modules)


class RowEdits:
    """The edits of a batch's rows, applied in the scope of each pass; between passes the model is unmodified.

    A row's choice at prefill (a codebook entry, a memory) holds for its decoding steps.

    Args:
        deltas: one per row, ``None`` for rows without an edit. If a hook edit's kind does not mix rows, all rows with
            an edit of that kind must have the same one.

    Raises:
        EditingError: for contexts, dense or masked edits, edits of the head, and hook edits of another model.
    """

    def __init__(self, model: nn.Module, deltas: Sequence[Delta | None]) -> None:
        inner = unwrapped(model)
        for delta in {id(delta): delta for delta in deltas if delta is not None}.values():
            require_no_context(delta)
            for name in delta.factors:
                if edited_module(inner, name) is head_of(inner):
                    raise EditingError(
                        f"{name} is the head, whose edits do not act per row; apply this one with edited(model, delta)."
                    )
        self._adapters = PerRowAdapters(inner, deltas)
        self._num_rows = len(deltas)
        self._device = next(inner.parameters()).device
        hook_edits = [delta.hook_edit if delta is not None else None for delta in deltas]
        kinds = sorted({hook_edit.kind for hook_edit in hook_edits if hook_edit is not None})
        self._kinds = [_bind_kind(inner, kind, hook_edits) for kind in kinds]

    def prefill(self, mask_RT: torch.Tensor, prompt_length_R: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Scope of the pass over the prompts (and, in teacher forcing, their continuations).

        Args:
            mask_RT: attention mask of this pass.
            prompt_length_R: number of prompt tokens of each row.
        """
        return self._scope(ForwardContext.for_prefill(mask_RT, prompt_length_R))

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Scope of a pass over one new token per row."""
        return self._scope(ForwardContext.for_step(self._num_rows, self._device))

    def select(self, rows: torch.Tensor) -> RowEdits:
        """The edits of some rows of the batch, in the order of ``rows``."""
        selected = copy.copy(self)
        selected._adapters = self._adapters.select(rows)
        selected._kinds = [kind.select(rows) for kind in self._kinds]
        selected._num_rows = len(rows)
        return selected

    @contextlib.contextmanager
    def _scope(self, context: ForwardContext) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks(*self._adapters.registrations()))
            for kind in self._kinds:
                kind.forward_context = context
                stack.enter_context(kind.attached())
            yield


def _bind_kind(model: nn.Module, kind: str, hook_edits: Sequence[HookEdit | None]) -> HookKind:
    """The hook edits of one kind among those of all rows, bound to the rows."""
    index_of_edit: dict[HookEdit, int] = {}
    edit_of_row = []
    for hook_edit in hook_edits:
        if hook_edit is None or hook_edit.kind != kind:
            edit_of_row.append(-1)
        else:
            edit_of_row.append(index_of_edit.setdefault(hook_edit, len(index_of_edit)))
    for hook_edit in index_of_edit:
        hook_edit.check(model)
    cls = kind_class(kind)
    assert cls.mixes_rows or len(index_of_edit) == 1, f"rows of {len(index_of_edit)} edits of kind {kind} in one batch"
    return cls(model, list(index_of_edit), torch.tensor(edit_of_row))
