"""One edit of several requests, and what later edits of a stream read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.lm.editing.unusable import edit_usable
from edit_hooks.request import EditRequest, InTurn
from edit_hooks.utils.progress import Progress

# A delta of several steps has this in its metadata, and the names step/<number>/<name in the step> in ``stream_state``.
STATES_OF_STEPS, OF_STEP = "states_of_steps", "step"


def write_together(
    editor: Editor[Any],
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[EditRequest],
    history: Sequence[Delta] = (),
    progress: Progress | None = None,
) -> Delta:
    """Write requests jointly if the editor supports it, else by the steps of a short stream.

    Args:
        requests: those of an :class:`~edit_hooks.request.InTurn` are written one after another by every editor.
        history: the edits in the model's weights.
        progress: called with the number of requests finished since the last call.
    """
    joint = editor.supports_joint
    past = [step for delta in history for step in steps_of(delta)]
    if joint and not isinstance(requests, InTurn):
        (delta,) = editor.edit(
            model, tokenizer, list(requests), joint=True, history=past, progress=progress, measure=False
        )
        return delta
    steps: list[Delta] = []
    with AppliedDeltas(model) as applied:
        for request in requests:
            steps += editor.edit(model, tokenizer, [request], joint=joint, history=[*past, *steps], measure=False)
            if progress:
                progress(1)
            if request is not requests[-1]:
                applied.add(steps[-1])
    return steps[0] if len(steps) == 1 else _as_one(steps)


def modules_behind(requests: Sequence[EditRequest]) -> tuple[str, ...]:
    """Modules besides the editor's whose code determines an edit of these requests, for its fingerprint.

    One request is written by the editor alone.
    """
    return (__name__, edit_usable.__module__) if len(requests) > 1 else ()


def _as_one(steps: Sequence[Delta]) -> Delta:
    """The sum of steps, with the state of each one under a name of its own."""
    total = Delta.summed(steps)
    total.meta[STATES_OF_STEPS] = True
    for number, step in enumerate(steps):
        total.stream_state |= {f"{OF_STEP}/{number}/{name}": tensor for name, tensor in step.stream_state.items()}
    return total


def steps_of(delta: Delta) -> list[Delta]:
    """What an editor reads of a delta in its history: of several steps, the state and metadata of each.

    How states add up is known to the editor alone. The updates, whose sum is all that is left of them, are in the last
    one.
    """
    if not delta.meta.get(STATES_OF_STEPS) or not delta.stream_state:
        return [delta]
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in delta.stream_state.items():
        _, number, own_name = name.split("/", 2)
        states.setdefault(int(number), {})[own_name] = tensor
    steps = [Delta(stream_state=state, meta=delta.meta["parts"][number]) for number, state in sorted(states.items())]
    return [*steps[:-1], replace(delta, stream_state=steps[-1].stream_state, meta=steps[-1].meta)]
