"""Scopes that are left in another order, entered twice, abandoned, or disturbed by other code: never wrong weights."""

from __future__ import annotations

import contextlib

import pytest
import torch
from random_deltas import codebook, dense_delta, random_delta, rewrite_name
from state import assert_same_state

from edit_hooks import Delta, EditingError, PerRowAdapters, edited
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.modeling.forward.prefix_attention import cached_prefix
from edit_hooks.modeling.forward.prefix_cache import compute_prefix_cache
from edit_hooks.modeling.hooks import forward_replaced, frozen

IDS = torch.tensor([[5, 9, 17, 23]])


@pytest.fixture
def model():
    return build_model("llama")


def weights_and_hooks(model, seed):
    return Delta(dense=dense_delta(model, layer=seed % 2, seed=seed).dense, hook_edit=codebook(model, seed=seed))


@pytest.mark.parametrize("same_weight", [True, False])
def test_an_outer_scope_that_is_left_first_restores_everything_and_both_are_refused(model, same_weight):
    before = snapshot(model)
    outer = edited(model, weights_and_hooks(model, 0))
    inner = edited(model, dense_delta(model, layer=0 if same_weight else 1, seed=5))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(EditingError, match="left while a later one"):
        outer.__exit__(None, None, None)
    assert_same_state(before, snapshot(model))
    with pytest.raises(EditingError, match="Nest the scopes"):  # its answers since then were not under its edit
        inner.__exit__(None, None, None)
    assert_same_state(before, snapshot(model))
    with edited(model, random_delta(model)):
        assert model.get_parameter(f"{rewrite_name(model)}.weight") is not None
    assert_same_state(before, snapshot(model))


def test_three_scopes_left_in_every_order_leave_the_original_weights(model):
    before = snapshot(model)
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1]):
        scopes = [edited(model, dense_delta(model, seed=seed)) for seed in range(3)]
        for scope in scopes:
            scope.__enter__()
        refused = 0
        for index in order:
            try:
                scopes[index].__exit__(None, None, None)
            except EditingError:
                refused += 1
        assert refused >= 2
        assert_same_state(before, snapshot(model))


def test_a_generator_that_is_closed_late_is_noticed_by_the_scope_inside(model):
    before = snapshot(model)

    def answers():
        with edited(model, dense_delta(model, seed=1)):
            yield model(IDS).logits

    running = answers()
    next(running)
    with pytest.raises(EditingError, match="close generators"), edited(model, dense_delta(model, seed=2)):
        running.close()
    assert_same_state(before, snapshot(model))


def test_an_abandoned_scope_is_undone(model):
    before = snapshot(model)
    AppliedDeltas(model).__enter__().add(dense_delta(model))
    assert_same_state(before, snapshot(model))
    PerRowAdapters(model, [random_delta(model)]).__enter__()
    assert_same_state(before, snapshot(model))


def test_a_scope_is_entered_once_and_written_while_it_is_the_innermost(model):
    before = snapshot(model)
    applied = AppliedDeltas(model)
    with pytest.raises(EditingError, match="not open"):
        applied.add(dense_delta(model))
    with applied:
        applied.add(dense_delta(model))
        with pytest.raises(EditingError, match="open already"), applied:
            pytest.fail("entered twice")
        with edited(model, random_delta(model)), pytest.raises(EditingError, match="later scope"):
            applied.add(random_delta(model, seed=1))
    assert_same_state(before, snapshot(model))
    with applied:  # again, after it has ended
        applied.add(dense_delta(model))
    assert_same_state(before, snapshot(model))
    rows = PerRowAdapters(model, [random_delta(model)])
    with rows, pytest.raises(EditingError, match="active already"), rows:
        pytest.fail("entered twice")
    assert_same_state(before, snapshot(model))


def in_place(weight):
    weight.mul_(2)


def behind_autograd(weight):
    weight.data += 1e-3


@pytest.mark.parametrize("change", [in_place, behind_autograd])
def test_a_change_by_other_code_is_refused_and_the_original_restored(model, change):
    before = snapshot(model)
    name = f"{rewrite_name(model)}.weight"
    refused = pytest.raises(EditingError, match=f"other code changed {name}")
    with refused, edited(model, dense_delta(model)), torch.no_grad():
        change(model.get_parameter(name))
    assert_same_state(before, snapshot(model))
    with pytest.raises(ValueError, match="theirs"), edited(model, dense_delta(model)):  # is not replaced
        with torch.no_grad():
            change(model.get_parameter(name))
        raise ValueError("theirs")
    assert_same_state(before, snapshot(model))


def test_a_replaced_or_converted_parameter_gets_the_original_too(model):
    name = f"{rewrite_name(model)}.weight"
    original = model.get_parameter(name).detach().clone()
    with pytest.raises(EditingError, match="other code changed"), edited(model, dense_delta(model)):
        module = model.get_submodule(rewrite_name(model))
        module.weight = torch.nn.Parameter(module.weight.detach().clone())
    assert torch.equal(model.get_parameter(name), original)
    with pytest.raises(EditingError, match="change of dtype"), edited(model, dense_delta(model)):
        model.to(torch.bfloat16)
    assert torch.equal(model.get_parameter(name), original.to(torch.bfloat16))


def test_flags_forwards_and_attention_may_be_left_in_any_order(model):
    """A scope that is left early passes the state from before it on; nothing stays frozen, replaced or prefixed."""
    model.train()
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    rewrite = model.get_submodule(rewrite_name(model))
    layers = compute_prefix_cache(model, [[5, 9, 17]]).layers
    pairs = (
        lambda: frozen(model),
        lambda: forward_replaced(rewrite, lambda x: torch.zeros_like(x)),
        lambda: cached_prefix(model, layers),
    )
    for make in pairs:
        outer, inner = make(), make()
        outer.__enter__()
        inner.__enter__()
        during = snapshot(model)
        outer.__exit__(None, None, None)
        assert_same_state(during, snapshot(model))  # the inner scope still holds
        inner.__exit__(None, None, None)
        assert_same_state(before, snapshot(model))


def test_scopes_on_two_models_do_not_know_each_other():
    first, second = build_model("llama"), build_model("gpt2")
    states = [snapshot(model) for model in (first, second)]
    with contextlib.ExitStack() as stack:
        scope = edited(first, dense_delta(first))
        scope.__enter__()
        stack.enter_context(edited(second, dense_delta(second)))
        scope.__exit__(None, None, None)
    for model, before in zip((first, second), states, strict=True):
        assert_same_state(before, snapshot(model))
