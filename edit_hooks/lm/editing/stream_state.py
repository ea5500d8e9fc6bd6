"""What a stream carries from step to step, and a warning before it no longer fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.lm.editing.joint import steps_of
from edit_hooks.modeling.memory import free_bytes
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

GIB = 2**30
FIRST_CHECK = 8  # steps; then at every doubling, so that the checks take no time


@dataclass(frozen=True)
class StreamState:
    """What the steps so far leave to the next one.

    Attributes:
        history: as the editor condensed it.
        unseen: checksums of steps that changed nothing, which do not show in the weights.
    """

    num_steps: int = 0
    history: tuple[Delta, ...] = ()
    unseen: tuple[str, ...] = ()
    edits_made: bool = False

    def after(self, delta: Delta, editor: Editor[Any], model: nn.Module) -> StreamState:
        """With one more step; one without a usable request has nothing to carry."""
        if not (delta.writes or delta.stream_state):
            return StreamState(self.num_steps + 1, self.history, self.unseen, self.edits_made)
        history = editor.condensed(model, [*self.history, *steps_of(delta)])
        unseen = self.unseen if delta.writes else (*self.unseen, delta.checksum())
        return StreamState(self.num_steps + 1, tuple(history), unseen, True)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(delta.num_bytes for delta in self.history)


class GrowthWatch:
    """Extrapolates what a stream carries to its last step, and warns once if that does not fit.

    Args:
        bound: what it can take at most, if there is a bound.
    """

    def __init__(self, name: str, num_steps: int, bound: int | None) -> None:
        self._name, self._num_steps, self._bound = name, num_steps, bound
        self._last = (0, 0)
        self._has_warned = False

    def check(self, carried: StreamState) -> None:
        """Look at the state after a step."""
        now = carried.num_steps
        if self._has_warned or now < FIRST_CHECK or now & (now - 1):
            return
        before, bytes_before = self._last
        num_bytes = carried.num_bytes
        self._last = now, num_bytes
        if not before:  # what is there from the first step on does not grow
            return
        growth = (num_bytes - bytes_before) / (now - before)
        final = num_bytes + growth * (self._num_steps - now)
        final = min(final, self._bound) if self._bound is not None else final
        free = free_bytes(torch.device("cpu"))
        if free is not None and final - num_bytes > free:
            self._has_warned = True
            log.warning(
                "the stream of %s carries %.3g GiB after %d of %d steps and will need %.3g GiB of memory; %.3g GiB are "
                "free. Plan fewer edits, or an editor whose state does not grow (docs: long streams).",
                self._name,
                num_bytes / GIB,
                now,
                self._num_steps,
                final / GIB,
                (num_bytes + free) / GIB,
            )


def rebuilt(deltas: Sequence[Delta], editor: Editor[Any], model: nn.Module) -> StreamState:
    """The state after some steps, from their whole deltas."""
    carried = StreamState()
    for delta in deltas:
        carried = carried.after(delta, editor, model)
    return carried
