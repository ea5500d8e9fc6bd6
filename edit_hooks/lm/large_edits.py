"""Finished edits that are too large to stay in memory: they are read again from the store."""

from __future__ import annotations

from dataclasses import replace

from edit_hooks.deltas.delta import Delta
from edit_hooks.store.store import Description, Store

# Edits that are written into the weights and stay in memory, in bytes. One dense update of Llama 3 8B's MLP output has
# 235 MB in float32, so a few hundred cases would fill any machine.
MOST_BYTES = 4 * 2**30


class LargeEdits:
    """Chooses the edits that stay in memory.

    Edits that act per row stay: they are small, or (side memories) share batches. Of the others the first ones of a run
    stay, up to :data:`MOST_BYTES`. Later ones keep all but their updates of weights, if the store has them; without a
    store there is nowhere else to read them from, so all stay.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._num_bytes = 0
        self._dropped: dict[Delta, tuple[Description, int]] = {}

    def kept(self, delta: Delta, description: Description) -> Delta:
        """What stays in memory of a finished edit that was stored under ``description``, or could not be."""
        if delta.acts_per_row or not delta.parameter_names:
            return delta
        size = delta.num_bytes
        if self._store is None or self._num_bytes + size <= MOST_BYTES or not self._store.has_delta(description):
            self._num_bytes += size
            return delta
        rest = replace(delta, factors={}, dense={}, masks={})
        self._dropped[rest] = description, size
        return rest

    def __contains__(self, kept: Delta) -> bool:
        """Whether the updates of an edit were dropped."""
        return kept in self._dropped

    def whole(self, kept: Delta) -> Delta | None:
        """The edit with its updates; ``None`` if they were dropped and the store no longer has them."""
        if kept not in self._dropped:
            return kept
        assert self._store is not None
        read = self._store.load_delta(self._dropped[kept][0])
        # what was recorded about the edit since it was stored is in memory only
        return read and replace(read, diagnostics=kept.diagnostics, meta=kept.meta)

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
