"""Where the tensors of finished edits are, on a pretended device: large ones do not wait beside the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretended_device import DEVICE, move_model, pretended_device

from edit_hooks import Delta
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.deltas.apply import AppliedDeltas, edited

CPU = torch.device("cpu")
FT = {"num_steps": 2, "lr": 5e-3, "early_stop_loss": 0.0}
OVER_FT = {"base": "ft_m", "base_settings": FT, "layers": [1]}
SETTINGS: dict[str, dict[str, Any]] = {"ft_m": FT, "ft_l": FT, "rect": OVER_FT}


def devices(delta: Delta) -> set[torch.device]:
    return {update.device for update in delta.dense.values()}


@pytest.mark.parametrize("joint", [False, True], ids=["single", "joint"])
@pytest.mark.parametrize("editor", SETTINGS)
def test_finished_dense_edits_wait_on_the_cpu(editor, joint):
    """A batch of edits of an 8B model would fill a GPU; the numbers are those of a model on the CPU."""
    subject = Subject(editor, "llama")
    here = subject.make(**SETTINGS[editor]).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:3], joint=joint)
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        there = subject.make(**SETTINGS[editor]).edit(model, subject.tokenizer, EDIT_REQUESTS[:3], joint=joint)
        assert [devices(delta) for delta in there] == [{CPU}] * (1 if joint else 3)
        weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
        before = weight.detach().clone()
        with edited(model, there[0]):
            assert weight.device == DEVICE and not torch.equal(weight.cpu(), before.cpu())
    for one, other in zip(here, there, strict=True):
        assert one.dense.keys() == other.dense.keys()
        for name, update in one.dense.items():
            torch.testing.assert_close(update, other.dense[name])


def test_updates_that_later_steps_do_not_read_stay_where_they_are(monkeypatch):
    """A step of FT-M reads the weights only, so earlier updates are not copied to the device again."""
    subject = Subject("ft_m", "llama")
    seen: list[set[torch.device]] = []
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        editor = subject.make(**FT)
        compute = editor.compute
        monkeypatch.setattr(
            editor, "compute", lambda job: seen.append(set().union(*map(devices, job.history))) or compute(job)
        )
        history: list[Delta] = []
        with AppliedDeltas(model) as applied:
            for request in EDIT_REQUESTS[:2]:
                history += editor.edit(model, subject.tokenizer, [request], history=history)
                applied.add(history[-1])
    assert seen == [set(), {CPU}]
