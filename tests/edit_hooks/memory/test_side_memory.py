"""Side memories: distances, the round trip through a hook edit, combining the steps of a stream."""

from __future__ import annotations

import pytest
import torch
from random_deltas import dense_delta, rewrite_name

from edit_hooks import Delta, EditingError, edited
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.memory.side_memory import Memory, MemoryBank, activation_shift, output_with_delta, row_distance
from edit_hooks.modeling.architectures import is_transposed, map_shape

IDS = torch.tensor([[5, 6, 7, 8]])


def memory(model, number: int, threshold: float = 0.0) -> Memory:
    (change,) = dense_delta(model, seed=number).dense.values()
    mask = torch.rand(change.shape, generator=torch.Generator().manual_seed(number)) < 0.5
    return Memory(number, change * mask, mask, threshold)


def settings(model) -> dict:
    return {
        "module": rewrite_name(model),
        "shape": list(model.get_submodule(rewrite_name(model)).weight.shape),
        "act_ratio": 1.0,
        "activation": None,
        "decide": "prompt",
        "max_over": None,
        "num_before": 0,
    }


def test_a_shift_is_measured_after_the_activation_function():
    output, other = torch.zeros(1, 1, 2), torch.tensor([[[3.0, 4.0]]])
    assert activation_shift(output, other, None).tolist() == [[5.0]]
    silu = float(torch.nn.functional.silu(torch.tensor([3.0, 4.0])).norm())
    assert float(activation_shift(output, other, "silu")) == pytest.approx(silu)


def test_distances_skip_other_tokens_and_long_rows_take_the_largest_shift():
    shift_RT = torch.tensor([[1.0, 3.0, 50.0], [2.0, 4.0, 9.0]])
    counted_RT = torch.tensor([[True, True, False], [True, True, True]])
    assert row_distance(shift_RT, counted_RT).tolist() == [2.0, 5.0]
    assert row_distance(shift_RT, counted_RT, max_over=2).tolist() == [2.0, 9.0]


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_output_with_a_change_is_that_of_the_changed_weight(model_type, tiny_model):
    model = tiny_model(model_type)
    module = model.get_submodule(rewrite_name(model))
    (change,) = dense_delta(model).dense.values()
    _, width_in = map_shape(module)
    x_RTF = torch.randn(2, 3, width_in, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output_RTD = module(x_RTF)
        with edited(model, dense_delta(model)):
            expected = module(x_RTF)
    ours = output_with_delta(x_RTF, output_RTD, change, is_transposed(module))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_bank_survives_the_round_trip(tiny_model):
    model = tiny_model("llama")
    weight = model.get_submodule(rewrite_name(model)).weight.detach()
    bank = MemoryBank(memory(model, 3, 0.5), [memory(model, 1, 0.25), memory(model, 2, 0.75)], 7, 4)
    assert [entry.number for entry in bank.memories] == [3, 1, 2]
    again = MemoryBank.from_hook_edit(bank.to_hook_edit(settings(model), {1, 2, 3}), weight)
    assert (again.num_edits, again.next_number) == (7, 4) and again.current.number == 3
    for ours, theirs in zip(again.memories, bank.memories, strict=True):
        assert (ours.number, ours.threshold) == (theirs.number, theirs.threshold)
        assert torch.equal(ours.change, theirs.change) and torch.equal(ours.mask, theirs.mask)
    assert MemoryBank.from_hook_edit(None, weight).memories == []


def test_the_last_step_decides_which_memories_exist(tiny_model):
    """A step holds the memories it changed; memories that were merged away are dropped."""
    model = tiny_model("llama")
    weight = model.get_submodule(rewrite_name(model)).weight.detach()
    first = MemoryBank(None, [memory(model, 0), memory(model, 1)]).to_hook_edit(settings(model), {0, 1})
    second = MemoryBank(memory(model, 2), [memory(model, 1)]).to_hook_edit(settings(model), {2})
    combined = HookEdit.combine([first, second])
    assert combined.tensors.keys() == {f"{number}/{part}" for number in (1, 2) for part in ("values", "mask")}
    bank = MemoryBank.from_hook_edit(combined, weight)
    assert torch.equal(bank.stored[0].change, memory(model, 1).change)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_chosen_memory_is_the_changed_weight(model_type, tiny_model):
    """Above its threshold a row runs with W', below it with W, bit for bit."""
    model = tiny_model(model_type)
    used, unused = memory(model, 0, threshold=0.0), memory(model, 0, threshold=1e6)
    deltas = [Delta(hook_edit=MemoryBank(entry, []).to_hook_edit(settings(model), {0})) for entry in (used, unused)]
    with torch.no_grad():
        plain = model(IDS).logits
        with edited(model, deltas[0]):
            inside = model(IDS).logits
        with edited(model, deltas[1]):
            assert torch.equal(model(IDS).logits, plain)
        with edited(model, Delta(dense={f"{rewrite_name(model)}.weight": used.change})):
            torch.testing.assert_close(inside, model(IDS).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(inside, plain, atol=1e-2)


def test_memories_of_another_shape_are_refused(tiny_model):
    model = tiny_model("llama")
    hook_edit = MemoryBank(memory(model, 0), []).to_hook_edit({**settings(model), "shape": [3, 3]}, {0})
    with pytest.raises(EditingError, match=r"have shape \[3, 3\]"):
        hook_edit.check(model)
