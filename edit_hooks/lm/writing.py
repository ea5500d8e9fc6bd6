"""One edit of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.request import EditRequest, InTurn


def write_together(
    editor: Editor[Any],
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[EditRequest],
    history: Sequence[Delta] = (),
) -> Delta:
    """Write requests jointly if the editor supports it, else by the steps of a short stream.

    Args:
        requests: those of an :class:`~edit_hooks.request.InTurn` are written one after another by every editor.
        history: the edits in the model's weights.
    """
    joint = editor.supports_joint
    if joint and not isinstance(requests, InTurn):
        (delta,) = editor.edit(model, tokenizer, list(requests), joint=True, history=history)
        return delta
    steps: list[Delta] = []
    with AppliedDeltas(model) as applied:
        for request in requests:
            steps += editor.edit(model, tokenizer, [request], joint=joint, history=[*history, *steps])
            if request is not requests[-1]:
                applied.add(steps[-1])
    return steps[0] if len(steps) == 1 else Delta.summed(steps)
