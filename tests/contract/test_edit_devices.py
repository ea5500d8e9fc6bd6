"""Where tensors of finished edits are, on a pretended device: large ones wait beside the model if it has room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edit_runs import quick_settings
from pretended_device import DEVICE, Remote, move_delta, move_model, pretended_device

from edit_hooks import Delta
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.deltas import placement
from edit_hooks.deltas.apply import AppliedDeltas, edited
from edit_hooks.deltas.delta import Factor
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.placement import off_device
from edit_hooks.lm.editing import memory_limit
from edit_hooks.lm.editing.memory_limit import LargeEdits
from edit_hooks.store.store import Description

CPU = torch.device("cpu")
NOWHERE = Description(what="independent edit", model={}, code="", inputs={})
FT = {"num_steps": 2, "lr": 5e-3, "early_stop_loss": 0.0}
OVER_FT = {"base": "ft_m", "base_settings": FT, "layers": [1]}
SETTINGS: dict[str, dict[str, Any]] = {"ft_m": FT, "ft_l": FT, "rect": OVER_FT, "prune": OVER_FT}


def devices(delta: Delta) -> set[torch.device]:
    sides = (side for factor in delta.factors.values() for side in factor[:2])
    return {update.device for update in [*delta.dense.values(), *sides]}


@pytest.mark.parametrize("joint", [False, True], ids=["single", "joint"])
@pytest.mark.parametrize("editor", SETTINGS)
def test_finished_dense_edits_wait_where_there_is_room(editor, joint, monkeypatch):
    """A batch of edits of an 8B model would fill a GPU; the numbers are those of a model on the CPU."""
    has_room = not joint
    monkeypatch.setattr(placement, "has_room", lambda device, num_bytes: has_room)
    subject = Subject(editor, "llama")
    options = {"joint": joint, "measure": False}
    here = subject.make(**SETTINGS[editor]).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:3], **options)
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        there = subject.make(**SETTINGS[editor]).edit(model, subject.tokenizer, EDIT_REQUESTS[:3], **options)
        on_gpu = has_room and editor != "prune"  # whose updates are decomposed on the CPU
        assert [devices(delta) for delta in there] == [{DEVICE if on_gpu else CPU}] * (1 if joint else 3)
        weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
        before = weight.detach().clone()
        with edited(model, there[0]):
            assert weight.device == DEVICE and not torch.equal(weight.cpu(), before.cpu())
    for one, other in zip(here, there, strict=True):
        assert one.dense.keys() == other.dense.keys()
        for name, update in one.dense.items():
            torch.testing.assert_close(update, other.dense[name].cpu())


@pytest.mark.parametrize("has_room", [False, True])
def test_kept_edits_wait_on_the_cpu_if_the_device_has_no_room(has_room, monkeypatch):
    """Those of low rank and the tensors of hooks, too: thousands of them are kept for the answers of a run."""
    monkeypatch.setattr(memory_limit, "free_cuda_bytes", lambda device: has_room * 10**9)
    name = "model.layers.1.mlp.down_proj"
    hook_edit = HookEdit("codebook", {"0/keys": torch.ones(1, 4)}, {})
    delta = Delta(
        factors={name: Factor(torch.ones(3, 1), torch.ones(4, 1))},
        masks={name: torch.ones(2, dtype=torch.uint8)},
        dense={f"{name}.bias": torch.ones(3)},
        hook_edit=hook_edit,
        stream_state={"keys": torch.ones(1, 4)},
    )
    with pretended_device():
        made = move_delta(delta, Remote)
        made.masks = {name: Remote(mask) for name, mask in delta.masks.items()}
        assert {tensor.device for tensor in made._tensors.values()} == {DEVICE}
        kept = LargeEdits(None).kept(made, NOWHERE)
        assert {tensor.device for tensor in kept._tensors.values()} == {DEVICE if has_room else CPU}
        kept = off_device(kept)
    assert kept.checksum() == delta.checksum() and LargeEdits(None).kept(delta, NOWHERE) is delta


@pytest.mark.parametrize("editor", ["ft_m", "lora"])
def test_updates_that_later_steps_do_not_read_stay_where_they_are(editor, monkeypatch):
    """A step of FT-M reads the weights only, one of LoRA the adapter: earlier updates are not copied back."""
    subject = Subject(editor, "llama")
    seen: list[set[torch.device]] = []
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        instance = subject.make(**quick_settings(subject))
        compute = instance.compute
        monkeypatch.setattr(
            instance, "compute", lambda job: seen.append(set().union(*map(devices, job.history))) or compute(job)
        )
        history: list[Delta] = []
        with AppliedDeltas(model) as applied:
            for request in EDIT_REQUESTS[:2]:
                history += map(off_device, instance.edit(model, subject.tokenizer, [request], history=history))
                applied.add(history[-1])
    assert seen == [set(), {CPU}]
