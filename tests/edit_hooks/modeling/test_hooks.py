"""Hooks: activations are recorded and replaced where they should be, and everything is undone."""

from __future__ import annotations

import pytest
import torch
from host_reads import ahead_on_a_cpu
from state import assert_same_state
from torch import nn
from value_problems import each_model, loaded

from edit_hooks.contract.state import snapshot
from edit_hooks.modeling.architectures import architecture_of
from edit_hooks.modeling.hooks import (
    CachedOutput,
    forward_replaced,
    frozen,
    hidden_of,
    hooks,
    on_input,
    on_output,
    outputs_replaced,
    record_at,
    record_output,
    stop_after,
)

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@torch.no_grad()
@each_model
def test_one_position_per_row_is_recorded(model_type):
    """Input and output of the rewrite module, against all positions read by hand."""
    model, _ = loaded(model_type)
    module = model.get_submodule(architecture_of(model).rewrite_name(1))
    seen = {}
    handle = module.register_forward_hook(lambda _m, args, output: seen.update(keys=args[0], outputs=output))
    model(IDS)
    handle.remove()
    records: dict[str, torch.Tensor] = {}
    column = torch.tensor([2, 0])
    with hooks(
        on_input(module, record_at(records, "keys", column)), on_output(module, record_at(records, "outputs", column))
    ):
        model(IDS)
    for name in ("keys", "outputs"):
        assert torch.equal(records[name], torch.stack([seen[name][0, 2], seen[name][1, 0]]))


def test_records_are_detached_and_at_least_float32():
    hidden = torch.randn(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    records: dict[str, torch.Tensor] = {}
    record_at(records, "x", torch.tensor([1, 2]))(hidden)
    assert records["x"].dtype == torch.float32 and not records["x"].requires_grad


@torch.no_grad()
def test_a_forward_pass_stops_after_the_module():
    model, _ = loaded("llama")
    arch, ran = architecture_of(model), []
    blocks = [model.get_submodule(arch.block_name(number)) for number in range(3)]
    reads = [on_output(block, lambda _hidden, number=number: ran.append(number)) for number, block in enumerate(blocks)]
    with hooks(*reads), stop_after(blocks[1]):
        model(IDS)
        pytest.fail("the statement behind the forward pass ran")
    assert ran == [0, 1]
    with hooks(*reads):
        model(IDS)
    assert ran == [0, 1, 0, 1, 2]


def test_other_errors_pass_through():
    with pytest.raises(ZeroDivisionError), stop_after(nn.Identity()):
        raise ZeroDivisionError


@torch.no_grad()
@each_model
def test_cached_outputs_replace_the_blocks_they_come_from(model_type):
    """Replaced by their own outputs, the lower blocks change nothing and do not run."""
    model, _ = loaded(model_type)
    blocks = [model.get_submodule(architecture_of(model).block_name(number)) for number in range(2)]
    outputs: dict[int, CachedOutput] = {}
    with hooks(record_output(outputs, 1, blocks[1])):
        expected = model(IDS, use_cache=False).logits
    attention = model.get_submodule(architecture_of(model).attention.format(0))
    ran = []
    with outputs_replaced(blocks, outputs[1].as_output()), hooks(on_output(attention, lambda _: ran.append(1))):
        assert torch.equal(model(IDS, use_cache=False).logits, expected)
    assert not ran
    assert torch.equal(model(IDS, use_cache=False).logits, expected)


def test_cached_outputs_keep_the_length_of_the_tuple():
    hidden = torch.zeros(1, 2, 3)
    assert CachedOutput.of(hidden).as_output() is hidden
    assert CachedOutput.of((hidden, "weights", "more")).as_output() == (hidden, None, None)
    assert hidden_of((hidden, None)) is hidden


def test_replaced_forwards_come_back_also_after_an_error():
    module = nn.Linear(2, 2)
    with pytest.raises(KeyError), forward_replaced(module, lambda x: x):
        assert module(3) == 3
        raise KeyError
    assert "forward" not in vars(module)
    wrapped = module.forward  # as accelerate stores its own forward on the instance
    module.__dict__["forward"] = wrapped
    with forward_replaced(module, lambda x: x):
        assert module(3) == 3
    assert vars(module)["forward"] is wrapped


def test_frozen_takes_no_attention_that_plans_for_every_shape(tiny_model):
    """On a GPU, where PyTorch may prefer that of cuDNN; the setting of the process is restored."""
    model, is_allowed = tiny_model("llama"), torch.backends.cuda.cudnn_sdp_enabled
    assert is_allowed()
    with frozen(model):
        assert is_allowed(), "on a CPU"
    with ahead_on_a_cpu(), pytest.raises(KeyError), frozen(model):
        with frozen(model):
            assert not is_allowed()
        assert not is_allowed()
        raise KeyError
    assert is_allowed()


def test_frozen_restores_modes_and_flags(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer("byte_bpe")
    model.train()
    model.get_submodule("transformer.h.0").eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    try:
        before = snapshot(model, tokenizer)
        with pytest.raises(KeyError), frozen(model):
            assert not any(parameter.requires_grad for parameter in model.parameters())
            assert not any(module.training for module in model.modules())
            raise KeyError
        assert_same_state(before, snapshot(model, tokenizer))
    finally:
        model.eval().requires_grad_(True)
