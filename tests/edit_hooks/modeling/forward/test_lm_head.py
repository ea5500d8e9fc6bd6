"""The head of every family: selected logits, their vector-Jacobian products, and slices of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from value_problems import each_model, keep_wide, loaded

from edit_hooks.modeling.forward import lm_head
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, ModelHead, PrecomputedLogits

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


def random_states(model, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, model.config.hidden_size, generator=generator, dtype=torch.float64)


@each_model
def test_all_logits_are_the_models_own(model_type):
    """Soft-capping and scaling included: the states before the head, taken from a plain forward."""
    model, _ = loaded(model_type)
    inputs = {}
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _m, args: inputs.update(states=args[0][0]))
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0]
    handle.remove()
    torch.testing.assert_close(ModelHead(model).logits(inputs["states"], WHOLE_VOCAB), expected, **TOLERANCE)


@each_model
def test_selected_logits_are_those_of_the_whole_vocabulary(model_type):
    model, _ = loaded(model_type)
    head, states = ModelHead(model), random_states(model, 3, 2)
    logits = head.logits(states, WHOLE_VOCAB)
    several, per_state = torch.tensor([8, 1, 1, 4]), torch.tensor([[1, 2], [9, 0], [4, 4]])
    torch.testing.assert_close(head.logits(states, slice(3, 11)), logits[:, 3:11], **TOLERANCE)
    torch.testing.assert_close(head.logits(states, several), logits[:, several], **TOLERANCE)
    torch.testing.assert_close(head.logits(states, per_state), logits.gather(1, per_state), **TOLERANCE)


def test_a_state_alone_takes_the_kernel_of_two_states():
    """To the last bit, at the width of a real model, where the slower kernel of a row of stride 0 rounds otherwise."""
    model = nn.Module()
    model.get_output_embeddings = lambda: model.head
    model.head = nn.Linear(640, 2048, bias=False, dtype=torch.float32)
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    states = torch.randn(2, 640, generator=torch.Generator().manual_seed(1))
    head = ModelHead(model)
    with torch.no_grad():
        pair, alone = head._project(states, slice(0, 2048)), head._project(states[:1], slice(0, 2048))
    assert alone.shape == (1, 2048)
    assert torch.equal(alone[0], pair[0])


@each_model
def test_vector_jacobian_products_are_those_of_autograd(model_type):
    """Also for a selection of the states, in which a state may occur twice."""
    model, _ = loaded(model_type)
    head, states = ModelHead(model), random_states(model, 3, 4).requires_grad_(True)
    index = torch.tensor([2, 0, 2])
    weights = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, vjp = head.logits_with_vjp(states.detach(), slice(3, 11))
    expected = head.logits(states, slice(3, 11))
    torch.testing.assert_close(logits, expected.detach(), **TOLERANCE)
    for row, state in enumerate(index.tolist()):
        (gradient,) = torch.autograd.grad(expected[state], states, weights[row], retain_graph=True)
        torch.testing.assert_close(vjp(weights, index)[row], gradient[state], **TOLERANCE)


def test_only_families_with_soft_capping_or_scaling_change_the_heads_output():
    families = ("gpt2", "llama", "gemma2", "olmo2")
    assert [name for name in families if not ModelHead(loaded(name)[0]).ends_with_projection] == ["gemma2"]


def test_slices_partition_the_vocabulary(monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_SLICE_WIDTH", 5)
    head = ModelHead(loaded("llama")[0])
    slices = head.slices(7, 1)
    assert [token for part in slices for token in range(part.start, part.stop)] == list(range(head.vocab_size))
    assert head.slices(1, 10**9) == [WHOLE_VOCAB]
    monkeypatch.setattr(lm_head, "SLICE_STEP", 3)
    assert {part.stop - part.start for part in head.slices(2, 50)[:-1]} == {24}  # 50 logits of 2 states, in steps of 3


class ScaledHead(nn.Linear):
    """A head that does more than multiply by its weight."""

    def forward(self, states):
        return 2 * super().forward(states)


def test_a_head_that_is_not_linear_is_not_sliced(monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_SLICE_WIDTH", 5)
    model, _ = loaded("llama")
    own, states = model.get_output_embeddings(), random_states(model, 3, 2)
    plain = ModelHead(model).logits(states, WHOLE_VOCAB)
    scaled = ScaledHead(own.in_features, own.out_features, bias=False, dtype=torch.float64)
    scaled.weight = own.weight
    model.set_output_embeddings(scaled)
    try:
        head = ModelHead(model)
        assert head.slices(7, 1) == [WHOLE_VOCAB]
        torch.testing.assert_close(head.logits(states, slice(3, 11)), 2 * plain[:, 3:11], **TOLERANCE)
        logits, vjp = head.logits_with_vjp(states, WHOLE_VOCAB)
        torch.testing.assert_close(logits, 2 * plain, **TOLERANCE)
        weights = torch.eye(3, head.vocab_size, dtype=torch.float64)
        torch.testing.assert_close(vjp(weights, torch.arange(3)), 2 * own.weight[:3].detach(), **TOLERANCE)
    finally:
        model.set_output_embeddings(own)


def test_a_hooked_head_is_not_sliced(monkeypatch):
    monkeypatch.setattr(lm_head, "MIN_SLICE_WIDTH", 5)
    model, _ = loaded("llama")
    handle = model.get_output_embeddings().register_forward_hook(lambda _m, _a, output: output + 1)
    try:
        assert ModelHead(model).slices(7, 1) == [WHOLE_VOCAB]
    finally:
        handle.remove()
    assert len(ModelHead(model).slices(7, 1)) > 1


def test_precomputed_logits_are_their_own_head():
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    head = PrecomputedLogits()
    assert torch.equal(head.logits(logits, slice(1, 4)), logits[:, 1:4])
    _, vjp = head.logits_with_vjp(logits, slice(1, 4))
    assert vjp(torch.ones(1, 3), torch.tensor([1])).tolist() == [[0, 1, 1, 1, 0, 0]]
