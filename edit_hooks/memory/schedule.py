"""When side memories are stored and merged in a stream of edits."""

from __future__ import annotations

from dataclasses import dataclass

from edit_hooks.memory.merging import merge_changes
from edit_hooks.memory.side_memory import Memory, MemoryBank

# Without ``retrieve``: weight of the memory that an earlier merge made.
MERGED_SHARE = 0.6


@dataclass(frozen=True)
class Schedule:
    """Settings of storing and merging.

    Attributes:
        save_every: number of edits after which a memory is stored and a new one started.
        merge_every: number of edits after which stored memories are merged; a multiple of ``save_every``.
        retrieve: merge the last group only, with equal weights; older groups do not change. Otherwise all are merged:
            the first time with equal weights, later with 0.6 for the merged one and 0.4 shared by the new ones.
        merge, density: as in :func:`edit_hooks.memory.merging.merge_changes`.
    """

    save_every: int
    merge_every: int
    retrieve: bool
    merge: str
    density: float

    def add_edit(self, bank: MemoryBank, memory: Memory) -> set[int]:
        """Count an edit in its trained memory; store and merge the memories that are due.

        Returns the numbers of the memories that changed.
        """
        bank.current, bank.num_edits = memory, bank.num_edits + 1
        bank.next_number = max(bank.next_number, memory.number + 1)
        changed = {memory.number}
        if bank.num_edits % self.save_every == 0:
            bank.stored.append(memory)
            bank.current = None
        if bank.num_edits % self.merge_every == 0:
            changed.add(self._merge_stored(bank))
            if bank.past.rows:
                bank.past.turns.append(0)
        return changed

    def _merge_stored(self, bank: MemoryBank) -> int:
        """Merge stored memories into one and return its number."""
        if self.retrieve:
            group = self.merge_every // self.save_every
            parts, bank.stored = bank.stored[-group:], bank.stored[:-group]
            weights = [1.0 / len(parts)] * len(parts)
        else:
            parts, bank.stored = bank.stored, []
            is_first = bank.num_edits == self.merge_every
            num_new = len(parts) if is_first else len(parts) - 1
            weights = [1.0 / num_new] * num_new
            if not is_first:
                weights = [MERGED_SHARE, *[(1 - MERGED_SHARE) / num_new] * num_new]
        change = merge_changes(self.merge, [part.change for part in parts], weights, self.density)
        threshold = min(part.threshold for part in parts)
        bank.stored.append(Memory(bank.next_number, change, change != 0, threshold))
        bank.next_number += 1
        return bank.stored[-1].number
