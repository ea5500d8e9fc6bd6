"""The check of the editor contract on streams: edits of weights that hold earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.editor import Editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.subject import (
    EDIT_REQUESTS,
    TOLERANCE,
    Subject,
    distance,
    largest_difference,
    require,
    require_unchanged,
)
from edit_hooks.deltas.apply import AppliedDeltas, edited
from edit_hooks.deltas.delta import Delta


def check_stream(subject: Subject) -> None:
    """Steps of a stream add up to the stream's final state, repeat bit for bit, and leave nothing behind."""
    before = snapshot(subject.model, subject.tokenizer)
    steps, gains, answers = _stream(subject)
    require_unchanged(before, subject, "after a stream")
    again, _, _ = _stream(subject)
    require([step.checksum() for step in steps] == [step.checksum() for step in again], "a repeated stream differs")
    difference = distance(steps[0], subject.deltas[0])
    require(difference < TOLERANCE, f"the first step differs from the single edit by {difference:.1e}")
    total = Delta.summed(steps)
    for name, update in total.weights().items():
        update = update.cpu()
        difference = float((gains[name] - update).norm() / update.norm().clamp(min=1e-30))
        require(difference < TOLERANCE, f"the sum of the steps differs from what {name} gains by {difference:.1e}")
    if total.runtime_part is not None:
        with edited(subject.model, _weights_of(total)):
            ours = subject.answers(total.runtime_part)
        require(ours == answers, "under the sum of the steps answers differ from those in the stream")
        _require_first_step_survives(subject, answers)


def _require_first_step_survives(subject: Subject, answers: Sequence[ScoredContinuation]) -> None:
    """The first step of a stream acts on its own prompt after the second one.

    Compared with answers in which the first step has no part, since a kind combines the steps in the stream too.
    """
    first = EDIT_REQUESTS[0]
    (unedited,), (other,) = subject.answers(None, [first]), subject.answers(subject.deltas[1], [first])
    for without, what in ((unedited, "unedited"), (other, "as under an edit of the second request alone")):
        if subject.answers(subject.deltas[0], [first]) != [without]:
            require(
                largest_difference(answers[0], without) > TOLERANCE,
                f"after the second step of a stream the prompt of the first is answered {what}; does combine of the "
                "hook kind drop earlier steps?",
            )


def _stream(subject: Subject) -> tuple[list[Delta], dict[str, torch.Tensor], list[ScoredContinuation]]:
    """Two steps on the same weights, the change of every parameter, and the answers after the second step."""
    editor = subject.make()
    steps: list[Delta] = []
    original = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
    with AppliedDeltas(subject.model) as applied:
        for request in EDIT_REQUESTS[:2]:
            joint = editor.supports_joint
            steps += editor.edit(subject.model, subject.tokenizer, [request], joint=joint, history=steps)
            applied.add(steps[-1])
        _require_stated_growth(editor, subject.model, steps)
        gains = {name: (value.detach() - original[name]).cpu() for name, value in subject.model.named_parameters()}
        answers = subject.answers(applied.runtime_part)
    return steps, gains, answers


def _require_stated_growth(editor: Editor[Any], model: nn.Module, steps: Sequence[Delta]) -> None:
    """What a stream carries does not grow if the editor states so."""
    carried: list[Delta] = []
    sizes = []
    for step in steps:
        carried = editor.condensed(model, [*carried, step])
        sizes.append(sum(delta.num_bytes for delta in carried))
    growth = editor.stream_growth
    require(
        growth is None or growth.grows != "no" or sizes[-1] <= sizes[0],
        f"stream_growth says that nothing grows in a stream, which carries {sizes[0]} bytes after one step and "
        f"{sizes[-1]} after {len(sizes)}",
    )


def _weights_of(delta: Delta) -> Delta:
    return Delta(factors=delta.factors, dense=delta.dense, masks=delta.masks)
