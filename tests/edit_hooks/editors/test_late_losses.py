"""Loops with an early stop read a loss when a device that runs ahead has the step that follows it."""

from __future__ import annotations

import pytest
from edit_runs import quick_settings
from host_reads import HostReads, ahead_on_a_cpu

from edit_hooks.contract.subject import EDIT_REQUESTS, Subject


@pytest.mark.parametrize("editor", ["memoir", "wise"])
def test_more_steps_wait_no_more_often(editor: str) -> None:
    subject = Subject(editor, "llama")
    found = {}
    for num_steps in (2, 2, 5):  # the first edit finds out about the model
        made = subject.make(**{**quick_settings(subject), "num_steps": num_steps, "lr": 1e-6})
        with ahead_on_a_cpu(), HostReads() as reads:
            (delta,) = made.edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
        assert len(delta.diagnostics["losses"]) == num_steps
        found[num_steps] = reads.found
    assert found[5] == found[2]


def test_ultraedit_reads_the_losses_of_a_batch_together() -> None:
    subject = Subject("ultraedit", "llama")
    with ahead_on_a_cpu(), HostReads() as reads:
        subject.make(**quick_settings(subject)).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:2], joint=True)
    assert not [read for read in reads.found if "ultraedit" in read and read.startswith("index")]
