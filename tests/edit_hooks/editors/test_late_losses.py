"""More steps of a training let a GPU wait no more often: it has the next work before a loss is read on the host."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from edit_runs import quick_settings
from host_reads import HostReads, ahead_on_a_cpu
from pretended_device import move_model, pretended_device

from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject, distance
from edit_hooks.contract.tiny_models import build_model

# Waits that a further step of an edit may have. The gate of these leaves out rows by their losses, so that gradients
# come after the read.
ALLOWED = {"two_way": 1, "consequence_ft": 1}


def steps_of(editor: str) -> set[str]:
    """The settings by which an editor itself makes more steps; those of editors on another one are the base's."""
    return {field.name for field in dataclasses.fields(editor_class(editor).config_class)} & {"num_steps", "fit_steps"}


TRAINING = [
    (editor, joint)
    for editor in EDITORS
    if steps_of(editor)
    for joint in (False, True)
    if not joint or editor_class(editor).supports_joint
]


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("editor", "joint"), TRAINING, ids=lambda value: value if isinstance(value, str) else None)
def test_more_steps_wait_no_more_often(editor: str, joint: bool) -> None:
    """Where a line waits, it waits as often with three more steps; what the first edit finds out is not counted."""
    subject, found = Subject(editor, "llama"), {}
    bound = {"early_stop_loss": 0.0} if hasattr(subject.editor_class.config_class, "early_stop_loss") else {}
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        for num_steps in (2, 5):
            made = subject.make(**dict.fromkeys(steps_of(editor), num_steps), **bound)
            with HostReads() as reads:
                made.edit(model, subject.tokenizer, EDIT_REQUESTS[:2], joint=joint, measure=False)
            found[num_steps] = Counter(reads.found)
    further = found[5] - found[2]
    assert further.total() <= 3 * 2 * ALLOWED.get(editor, 0), further


@pytest.mark.parametrize(
    ("editor", "joint"),
    [("ft_m", False), ("ft_m", True), ("loc_ft", True), ("pmet", True), ("suit", False), ("two_way", False)],
    ids=str,
)
def test_edits_are_the_same_where_gradients_come_before_the_losses_are_read(editor: str, joint: bool) -> None:
    """Some edits stop early, others late; their gradients are dropped on a device that runs ahead."""
    subject = Subject(editor, "llama", torch.float64)

    def made(**more: float):
        return subject.make(**more).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:3], joint=joint)

    (name,) = {"early_stop_loss", "learned_nll"} & {one.name for one in dataclasses.fields(subject.make().config_class)}
    losses = sorted(step["loss"] for delta in made(**{name: 0.0}) for step in delta.diagnostics["losses"])
    bound = {name: sum(losses[len(losses) // 2 :][:2]) / 2}  # no loss is as large
    expected = made(**bound)
    with ahead_on_a_cpu():
        found = made(**bound)
    steps = [[delta.diagnostics["steps"] for delta in deltas] for deltas in (found, expected)]
    assert steps[0] == steps[1] and (joint or len(set(steps[0])) > 1)
    for one, other in zip(found, expected, strict=True):
        curves = [[step["loss"] for step in delta.diagnostics["losses"]] for delta in (one, other)]
        assert curves[0] == pytest.approx(curves[1], abs=1e-9)
        is_nothing = other.diagnostics.get("update_norm_ratio", 1) < 1e-12  # SUIT's, with keys of random weights
        assert is_nothing or distance(one, other) < 1e-9


def test_ultraedit_reads_the_losses_of_a_batch_together() -> None:
    subject = Subject("ultraedit", "llama")
    with ahead_on_a_cpu(), HostReads(of_cpu=True) as reads:
        subject.make(**quick_settings(subject)).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:2], joint=True)
    assert not [read for read in reads.found if "ultraedit" in read and read.startswith("index")]
