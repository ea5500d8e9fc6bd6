"""Deltas written into weights: rounding, restoring, refusals before the first write, state."""

from __future__ import annotations

import pytest
import torch
from random_deltas import codebook, dense_delta, masked_delta, random_delta, rewrite_name
from state import assert_same_state

from edit_hooks import Delta, EditingError, edited
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.deltas.apply import UNEDITED_STATE, AppliedDeltas
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.modeling.architectures import architecture_of


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_deltas_is_rounded_once_and_undone_exactly(model_type, dtype, tiny_model):
    """After each delta the weight is W_0 + sum, rounded; in float32 that is a running sum, bit for bit."""
    model = tiny_model(model_type, dtype=dtype)
    before, name = snapshot(model), f"{rewrite_name(model)}.weight"
    deltas = [random_delta(model), dense_delta(model), masked_delta(model, seed=1)]
    original = model.get_parameter(name).detach().clone()
    running, total = original.clone(), torch.zeros(original.shape)
    with AppliedDeltas(model) as applied:
        for delta in deltas:
            applied.add(delta)
            running, total = running + delta.weights()[name].to(running), total + delta.weights()[name]
            expected = running if dtype == torch.float32 else (original.float() + total).to(dtype)
            assert torch.equal(model.get_parameter(name), expected)
    assert_same_state(before, snapshot(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_add_up_in_16_bits(dtype, tiny_model):
    """A hundred aligned steps below half a unit in the last place write what one edit of their sum writes."""
    model = tiny_model("llama", dtype=dtype)
    name, delta = f"{rewrite_name(model)}.weight", random_delta(model, ranks=(1,))
    weight = model.get_parameter(name)
    original = weight.detach().float()
    scale = 0.05 * float(original.norm() / delta.weights()[name].norm())
    factor = delta.factors[rewrite_name(model)]
    step = Delta(factors={rewrite_name(model): factor._replace(left=factor.left * scale / 100)})
    update = step.weights()[name]
    whole = update * 100
    with AppliedDeltas(model) as applied:
        for _ in range(100):
            applied.add(step)
        written = weight.detach().float() - original
        applied.restore()
        for _ in range(3):  # nothing is left of the sum before
            applied.add(step)
        assert torch.equal(weight, (original + (update + update + update)).to(dtype)) and not applied._first
    assert float((written * whole).sum() / whole.square().sum()) == pytest.approx(1, abs=0.02)
    assert torch.equal(weight.float(), original) and not applied._sums


def test_a_change_between_two_deltas_is_reported(tiny_model):
    """It is lost at the second one, which starts from the original."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    before, delta = snapshot(model), random_delta(model)
    weight = model.get_parameter(f"{rewrite_name(model)}.weight")
    with pytest.raises(EditingError, match="other code changed"), AppliedDeltas(model) as applied:
        applied.add(delta)
        with torch.no_grad():
            weight.add_(1)
        applied.add(delta)
    assert_same_state(before, snapshot(model))


def test_a_delta_of_another_model_is_refused_before_the_first_write(tiny_model):
    model = tiny_model("llama")
    before, name = snapshot(model), rewrite_name(model)
    good = random_delta(model)
    wrong = {
        "no module 'absent'": Delta(factors={"absent": good.factors[name]}),
        "no parameter 'absent.weight'": Delta(dense={"absent.weight": torch.ones(1)}),
        "maps": Delta(factors={name: good.factors[name]._replace(left=torch.ones(3, 2))}),
        "orientation": Delta(factors={name: good.factors[name]._replace(transposed=True)}),
        "has shape": Delta(dense={f"{name}.weight": torch.ones(2, 2)}),
    }
    for message, delta in wrong.items():
        delta.dense[f"{rewrite_name(model, 0)}.weight"] = dense_delta(model, layer=0).dense[
            f"{rewrite_name(model, 0)}.weight"
        ]
        with pytest.raises(EditingError, match=message), edited(model, good, delta):
            pytest.fail("the scope was entered")
        assert_same_state(before, snapshot(model))


def test_contexts_have_no_place_in_a_model(tiny_model):
    context = Delta(contexts=(ContextEdit("Port Elna is the capital of", "Dravonia"),))
    with pytest.raises(EditingError, match=r"ContextEdit\.before\(question\)"), edited(tiny_model("llama"), context):
        pytest.fail("the scope was entered")


def test_the_state_identifies_weights_hooks_and_contexts(tiny_model):
    model = tiny_model("llama")
    context = ContextEdit("Port Elna is the capital of", "Dravonia")
    deltas = [random_delta(model), Delta(hook_edit=codebook(model)), Delta(contexts=(context,))]
    states = [UNEDITED_STATE]
    with AppliedDeltas(model) as applied:
        assert applied.state() == UNEDITED_STATE and applied.hook_edit is None
        for delta in deltas:
            applied.add(delta)
            states.append(applied.state())
        assert applied.hook_edit.kind == "codebook" and applied.runtime_part.contexts == (context,)
        applied.restore()
        assert applied.state() == UNEDITED_STATE and applied.runtime_part is None
    assert len(set(states)) == 4
    with AppliedDeltas(model) as again:
        for delta in deltas:
            again.add(delta)
        assert again.state() == states[-1]


def test_the_norm_ratio_is_that_of_the_sum(tiny_model):
    model = tiny_model("llama")
    deltas = [random_delta(model, layers=(0, 1), ranks=(1, 1)), random_delta(model, seed=1)]
    total = Delta.summed(deltas).weights()
    change = sum(float(update.norm()) ** 2 for update in total.values())
    weight = sum(float(model.get_parameter(name).detach().norm()) ** 2 for name in total)
    with AppliedDeltas(model) as applied:
        assert applied.norm_ratio() == 0.0
        for delta in deltas:
            applied.add(delta)
        assert applied.norm_ratio() == pytest.approx((change / weight) ** 0.5, rel=1e-4)


def test_weights_inside_an_adapter_are_found():
    peft = pytest.importorskip("peft")
    model = build_model("llama")
    delta, dense = random_delta(model), dense_delta(model, layer=0)
    names = [architecture_of(model).rewrite_name(layer) for layer in (0, 1)]
    expected = [model.get_submodule(name).weight.detach().clone() for name in names]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names))
    with edited(wrapped, delta, dense):
        inner = wrapped.base_model.model
        for name, start, update in zip(names, expected, (dense, delta), strict=True):
            torch.testing.assert_close(
                inner.get_submodule(name).base_layer.weight, start + update.weights()[f"{name}.weight"]
            )
