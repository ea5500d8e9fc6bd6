"""Finished edits that are too large to stay in memory: they are read again from the store."""

from __future__ import annotations

from dataclasses import replace

import torch

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.placement import off_device, saved_tensors
from edit_hooks.modeling.memory import free_cuda_bytes
from edit_hooks.store.store import Description, Store

# Edits that stay in memory, in bytes. On Llama 3 8B one dense update of an MLP output has 235 MB in float32, a side
# memory 54 MB, so a few hundred cases would fill any machine.
MOST_BYTES = 4 * 2**30
GPU_SHARE = 4  # edits that wait on a GPU take at most a quarter of its free memory
# The same for the steps of a stream, of which there can be hundreds of thousands: only later passes read them.
MOST_STREAM_BYTES, MOST_STREAM_EDITS = 2**28, 1000


class LargeEdits:
    """Chooses the edits that stay in memory.

    On a GPU the first ones wait beside the weights, in a part of the memory that was free at the first edit. Others are
    kept on the CPU, up to :data:`MOST_BYTES`. Of later ones no tensor stays, if the store has them; without a store
    there is nowhere else to read them from, so all stay.

    Args:
        of_stream: the edits are steps of a stream. Fewer stay, and their metadata and diagnostics leave, too; later
            steps read what they need elsewhere.

    Attributes:
        num_bytes: size of the edits that stay in memory.
    """

    def __init__(self, store: Store | None, *, of_stream: bool = False) -> None:
        self._store, self._of_stream = store, of_stream
        self.num_bytes = self._num_kept = 0  # of those that stay in memory
        self._gpu_room: dict[torch.device, int] = {}
        self._dropped: dict[Delta, tuple[str, int]] = {}  # key in the store, size

    def kept(self, delta: Delta, description: Description, on_host: Delta | None = None) -> Delta:
        """What stays in memory of a finished edit that was stored under ``description``, or could not be.

        Args:
            on_host: its copy on the CPU, if there is one.
        """
        if not delta.num_bytes or self._stays_on_gpu(delta):
            return delta
        delta = on_host or off_device(delta)
        if self._has_room(delta.num_bytes) or self._store is None or not self._store.has_delta(description):
            self.num_bytes += delta.num_bytes
            self._num_kept += 1
            return delta
        no_tensors = replace(delta, factors={}, dense={}, masks={}, hook_edit=None, stream_state={})
        rest = Delta() if self._of_stream else no_tensors
        self._dropped[rest] = description.key, delta.num_bytes
        return rest

    def _stays_on_gpu(self, delta: Delta) -> bool:
        """Whether an edit waits on the GPU that it was made on."""
        devices = {tensor.device for tensor in saved_tensors(delta)}
        if self._of_stream or len(devices) > 1 or (device := devices.pop()).type != "cuda":
            return False
        if device not in self._gpu_room:
            self._gpu_room[device] = free_cuda_bytes(device) // GPU_SHARE
        if delta.num_bytes > self._gpu_room[device]:
            return False
        self._gpu_room[device] -= delta.num_bytes
        return True

    def _has_room(self, size: int) -> bool:
        if self._of_stream and self._num_kept >= MOST_STREAM_EDITS:
            return False
        most = min(MOST_BYTES, MOST_STREAM_BYTES) if self._of_stream else MOST_BYTES
        return self.num_bytes + size <= most

    def __contains__(self, kept: Delta) -> bool:
        """Whether tensors of an edit were dropped."""
        return kept in self._dropped

    def whole(self, kept: Delta) -> Delta | None:
        """The edit with its tensors; ``None`` if they were dropped and the store no longer has them."""
        if kept not in self._dropped:
            return kept
        assert self._store is not None
        read = self._store.load_delta_of_key(self._dropped[kept][0])
        if read is None or self._of_stream:
            return read
        # what was recorded about the edit since it was stored is in memory only
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
