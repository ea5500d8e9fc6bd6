"""Jobs whose edits are written into the weights while they are answered (``answer=patch``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.items import GenerateItem, ScoreItem, StateItem

ItemT = TypeVar("ItemT", ScoreItem, GenerateItem, StateItem)


class _WrittenDelta(Delta):
    """An edit whose updates never act per row; a low-rank one becomes dense while it is written, and not before."""

    @property
    def acts_per_row(self) -> bool:
        return not self.parameter_names and super().acts_per_row


def written(jobs: Sequence[tuple[ItemT, Delta | None]]) -> list[tuple[ItemT, Delta | None]]:
    """The jobs with edits that are written into the weights, one object per edit, so that its items share batches."""
    deltas: dict[Delta, Delta] = {}
    for _, delta in jobs:
        if delta is not None and delta not in deltas:
            deltas[delta] = _WrittenDelta(delta.factors, delta.dense, delta.masks, delta.hook_edit)
    return [(item, None if delta is None else deltas[delta]) for item, delta in jobs]
