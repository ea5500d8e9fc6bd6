"""Streams whose earlier steps are on different devices, as after a stream on an accelerator was resumed."""

from __future__ import annotations

import pytest
import torch
from edit_runs import quick_settings
from pretended_device import DEVICE, Remote, move_delta, move_model, pretended_device

from edit_hooks import Delta
from edit_hooks.base.registry import EDITORS
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.deltas.apply import AppliedDeltas, edited
from edit_hooks.deltas.delta import Factor
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store

CPU = torch.device("cpu")


# Every fourth editor of the registry, whose neighbors share code; `-m slow` runs the others.
@pytest.mark.parametrize(
    "editor", [pytest.param(name, marks=[pytest.mark.slow] if row % 4 else []) for row, name in enumerate(EDITORS)]
)
def test_steps_from_the_store_and_new_ones_are_combined(editor):
    """The first step on the CPU, as one from the store is, the second on the model's device.

    The third step has the bits that it has after a stream which was not interrupted.
    """
    subject = Subject(editor, "llama")
    settings = quick_settings(subject)
    joint = subject.capabilities.supports_joint
    # Made on the CPU: a loaded edit has all tensors there.
    options = {"joint": joint, "measure": False}
    (first,) = subject.make(**settings).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1], **options)
    if not first.stream_state and first.hook_edit is None:
        return  # this editor's steps read the weights only
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        instance = subject.make(**settings)

        def edit(number: int, history: list[Delta]) -> Delta:
            (delta,) = instance.edit(model, subject.tokenizer, [EDIT_REQUESTS[number]], history=history, **options)
            return delta

        with AppliedDeltas(model) as applied:
            applied.add(first)
            second = edit(1, [first])
            applied.add(second)
            resumed = edit(2, [first, second])
            unbroken = edit(2, [move_delta(first, Remote), second])
        assert {tensor.device for tensor in resumed.stream_state.values()} <= {CPU}
        assert {tensor.device for tensor in resumed.dense.values()} <= {DEVICE, CPU}  # those of fine-tuning wait there
        assert {side.device for factor in resumed.factors.values() for side in factor[:2]} <= {DEVICE}
        local = (move_delta(delta, torch.Tensor.cpu) for delta in (resumed, unbroken))
        assert len({delta.checksum() for delta in local}) == 1


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_a_resumed_stream_forms_stored_updates_on_the_device(dtype, tmp_path):
    """A joint step of rank two, whose product has other bits on another device. Between uses, steps are on the CPU."""
    subject = Subject("alphaedit", "llama")
    identity = model_identity(subject.model, subject.tokenizer)

    def make(num_requests: int, store: Store | None) -> EditStream:
        groups = chunked([(request,) for request in EDIT_REQUESTS[:num_requests]], 2, cumulative=True)
        plan = EditPlan(groups, cumulative=True)
        editor = subject.make(**quick_settings(subject))
        stream = EditStream(
            model, subject.tokenizer, editor, plan, store, identity, Guard(), quiet=True, measure_edits=False
        )
        stream.make()
        return stream

    with pretended_device():
        model = build_model("llama", dtype=dtype)
        move_model(model)
        make(2, Store(tmp_path))
        resumed, unbroken = make(4, Store(tmp_path)), make(4, None)
        assert resumed.final_state == unbroken.final_state
        for stream in (resumed, unbroken):
            for delta in stream.deltas:
                assert {side.device for factor in delta.factors.values() for side in factor[:2]} == {CPU}


def test_a_loaded_update_is_formed_on_the_device_of_its_weight(monkeypatch):
    devices = []
    update = Factor.update
    monkeypatch.setattr(Factor, "update", lambda self: devices.append(self.left.device) or update(self))
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        delta = Delta(factors={"model.layers.1.mlp.down_proj": Factor(torch.ones(32, 2), torch.ones(64, 2))})
        with edited(model, delta):
            pass
    assert devices == [DEVICE]
    assert delta.factors["model.layers.1.mlp.down_proj"].left.device == CPU  # the edit itself has not moved


def test_a_loaded_and_a_new_edit_are_summed():
    name, parameter = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj.weight"
    one = Delta(factors={name: Factor(torch.ones(3, 1), torch.ones(4, 1))}, dense={parameter: torch.ones(3, 4)})
    with pretended_device():
        total = Delta.summed([one, move_delta(one, Remote)])
    assert total.weights()[f"{name}.weight"].tolist() == total.dense[parameter].tolist() == [[2.0] * 4] * 3
