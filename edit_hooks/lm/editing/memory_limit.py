"""Finished edits that are too large to stay in memory: they are read again from the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.placement import off_device
from edit_hooks.store.store import Description, Store

# Edits that stay in memory, in bytes. On Llama 3 8B one dense update of an MLP output has 235 MB in float32, a side
# memory 54 MB, so a few hundred cases would fill any machine.
MOST_BYTES = 4 * 2**30


class LargeEdits:
    """Chooses the edits that stay in memory.

    All are kept on the CPU. The first ones of a run stay, up to :data:`MOST_BYTES`. Of later ones no tensor stays, or
    only those that later edits read, if the store has them; without a store there is nowhere else to read them from, so
    all stay.

    Args:
        leaves: what leaves memory: ``all`` tensors, or the ``updates`` of weights only, where later edits read the
            hooks and ``stream_state`` of earlier ones.
    """

    def __init__(self, store: Store | None, leaves: Literal["all", "updates"] = "all") -> None:
        self._store = store
        self._leaves: dict[str, Any] = {"factors": {}, "dense": {}, "masks": {}}
        if leaves == "all":
            self._leaves |= {"hook_edit": None, "stream_state": {}}
        self._num_bytes = 0
        self._dropped: dict[Delta, tuple[Description, int]] = {}

    def kept(self, delta: Delta, description: Description) -> Delta:
        """What stays in memory of a finished edit that was stored under ``description``, or could not be."""
        delta = off_device(delta)
        rest = replace(delta, **self._leaves)
        size = delta.num_bytes - rest.num_bytes
        if size == 0:
            return delta
        if self._store is None or self._num_bytes + size <= MOST_BYTES or not self._store.has_delta(description):
            self._num_bytes += size
            return delta
        self._dropped[rest] = description, size
        return rest

    def __contains__(self, kept: Delta) -> bool:
        """Whether tensors of an edit were dropped."""
        return kept in self._dropped

    def whole(self, kept: Delta) -> Delta | None:
        """The edit with its tensors; ``None`` if they were dropped and the store no longer has them."""
        if kept not in self._dropped:
            return kept
        assert self._store is not None
        read = self._store.load_delta(self._dropped[kept][0])
        # what was recorded about the edit since it was stored is in memory only
        if read is None:
            return None
        facts = {name: getattr(kept, name) for name in ("effects", "cost", "warnings", "unusable")}
        return replace(read, diagnostics=kept.diagnostics, meta=kept.meta, **facts)

    def portions(self, kept: dict[str, Delta]) -> list[list[str]]:
        """The keys of edits, in portions that may be in memory together: those that are, then up to the bound each."""
        portions = [[key for key, delta in kept.items() if delta not in self._dropped]]
        room = 0
        for key, delta in kept.items():
            if delta in self._dropped:
                size = self._dropped[delta][1]
                if size > room:
                    portions.append([])
                    room = MOST_BYTES
                portions[-1].append(key)
                room -= size
        return [portion for portion in portions if portion]
