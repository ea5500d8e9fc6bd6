"""The vocabulary in slices: losses, gradients and picked logits as from all logits at once, on every architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import build_model
from torch import nn
from value_problems import KeepWide, each_model, loaded, relative

from edit_hooks.modeling import lm_head
from edit_hooks.modeling.lm_head import ALL, ModelHead, PrecomputedLogits
from edit_hooks.modeling.vocab_loss import greedy_tokens, likelihoods, log_likelihoods, top_tokens

WITHIN = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with KeepWide():
        yield


def plainly(logits_NV, token_L, original_EV):
    """NLL and KL by their definitions."""
    log_p_NV = logits_NV.log_softmax(1)
    nll_L = -log_p_NV[range(len(token_L)), token_L]
    log_p_EV = log_p_NV[len(token_L) :]
    return nll_L, (log_p_EV.exp() * (log_p_EV - original_EV.log_softmax(1))).sum(1)


def some_states(model, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, model.config.hidden_size, generator=generator, dtype=torch.float64)


@each_model
@pytest.mark.parametrize("fewest", [5, 2048])
def test_losses_and_gradients_equal_those_of_all_logits(model_type, fewest, monkeypatch):
    model, _ = loaded(model_type)
    monkeypatch.setattr(lm_head, "FEWEST_WORDS", fewest)
    head = ModelHead(model)
    assert (len(head.slices(7, 1)) > 1) == (fewest < head.num_words)
    token_L = torch.tensor([3, 9, 3, head.num_words - 1, 0])
    first = likelihoods(head, some_states(model, 7, 0), token_L, None, 1)
    torch.testing.assert_close(first.kl_E, torch.zeros_like(first.kl_E))
    states = some_states(model, 7, 1).requires_grad_(True)
    found = likelihoods(head, states, token_L, first.original, 1)
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((torch.cat([found.nll_L, found.kl_E]) * weights).sum(), states)

    logits = head.logits(states, ALL)
    nll, kl = plainly(logits, token_L, head.logits(some_states(model, 7, 0)[5:], ALL).detach())
    (expected,) = torch.autograd.grad((torch.cat([nll, kl]) * weights).sum(), states)
    torch.testing.assert_close(found.nll_L, nll, **WITHIN)
    torch.testing.assert_close(found.kl_E, kl, **WITHIN)
    torch.testing.assert_close(gradient, expected, **WITHIN)
    assert found.best_L.tolist() == logits[:5].argmax(1).tolist() == greedy_tokens(head, states[:5].detach()).tolist()
    log_p, best = log_likelihoods(head, states[:5].detach(), token_L)
    torch.testing.assert_close(log_p, -nll.detach(), **WITHIN)
    assert best.tolist() == found.best_L.tolist()


@each_model
def test_all_logits_are_the_models_own(model_type):
    """Soft-capping and scaling included: the states before the head, taken from a plain forward."""
    model, _ = loaded(model_type)
    kept = {}
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _m, args: kept.update(states=args[0][0]))
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0]
    handle.remove()
    torch.testing.assert_close(ModelHead(model).logits(kept["states"], ALL), expected, **WITHIN)


@each_model
def test_picked_words_are_those_of_all(model_type):
    model, _ = loaded(model_type)
    head, states = ModelHead(model), some_states(model, 3, 2)
    all_logits = head.logits(states, ALL)
    several, own = torch.tensor([8, 1, 1, 4]), torch.tensor([[1, 2], [9, 0], [4, 4]])
    torch.testing.assert_close(head.logits(states, slice(3, 11)), all_logits[:, 3:11], **WITHIN)
    torch.testing.assert_close(head.logits(states, several), all_logits[:, several], **WITHIN)
    torch.testing.assert_close(head.logits(states, own), all_logits.gather(1, own), **WITHIN)
    largest, words = top_tokens(head, states, 4)
    torch.testing.assert_close(head.logits(states, words), largest, **WITHIN)


@pytest.mark.parametrize("likely", [12.0, 27.0])
def test_gradients_survive_half_precision(likely):
    """A nearly certain target and logits that all moved alike: what is left is small, and must not drown in rounding.

    The same weights and states in bfloat16 and in float64; the logits' own rounding leaves a few percent.
    """
    generator = torch.Generator().manual_seed(0)
    models = [build_model("llama", dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    weight_VD = torch.randn(models[0].get_output_embeddings().weight.shape, generator=generator)
    weight_VD[:, 0] = 1  # along this direction all logits move alike
    token_L = torch.tensor([7, 11])
    toward_LD = weight_VD[token_L]
    before_ND = torch.randn(4, weight_VD.shape[1], generator=generator) * 0.2
    before_ND[:2] += likely * toward_LD / toward_LD.square().sum(1, keepdim=True)
    after_ND = before_ND + torch.randn(before_ND.shape, generator=generator) * 0.05
    after_ND[:, 0] += 8

    def gradients(model):
        head = ModelHead(model)
        with torch.no_grad():
            head.module.weight.copy_(weight_VD.bfloat16())
        before, after = (states.bfloat16().to(head.module.weight.dtype) for states in (before_ND, after_ND))
        original = likelihoods(head, before, token_L, None, 1).original
        found = likelihoods(head, after.requires_grad_(True), token_L, original, 1)
        return [torch.autograd.grad(loss.sum(), after, retain_graph=True)[0] for loss in (found.nll_L, found.kl_E)]

    for ours, exact in zip(*map(gradients, models), strict=True):
        assert float(exact.norm()) > 1e-5
        assert relative(ours.double(), exact) < 0.06


def test_many_states_are_read_in_parts(monkeypatch):
    model, _ = loaded("llama")
    head, states = ModelHead(model), some_states(model, 5, 3)
    token_L = torch.tensor([3, 9, 4, 1, 0])
    whole = log_likelihoods(head, states, token_L)
    monkeypatch.setattr(lm_head, "ROWS_AT_ONCE", 2)
    for ours, theirs in zip(log_likelihoods(head, states, token_L), whole, strict=True):
        torch.testing.assert_close(ours, theirs, **WITHIN)


class Scaled(nn.Linear):
    """A head that is more than its weight."""

    def forward(self, states):
        return 2 * super().forward(states)


def test_a_head_that_is_more_than_its_weight_is_used_whole(monkeypatch):
    monkeypatch.setattr(lm_head, "FEWEST_WORDS", 5)
    model, _ = loaded("llama")
    own, states = model.get_output_embeddings(), some_states(model, 3, 2)
    plain = ModelHead(model).logits(states, ALL)
    scaled = Scaled(own.in_features, own.out_features, bias=False, dtype=torch.float64)
    scaled.weight = own.weight
    model.set_output_embeddings(scaled)
    try:
        head = ModelHead(model)
        assert head.slices(7, 1) == [ALL]
        torch.testing.assert_close(head.logits(states, slice(3, 11)), 2 * plain[:, 3:11], **WITHIN)
    finally:
        model.set_output_embeddings(own)


def test_a_hooked_head_is_used_whole(monkeypatch):
    monkeypatch.setattr(lm_head, "FEWEST_WORDS", 5)
    model, _ = loaded("llama")
    handle = model.get_output_embeddings().register_forward_hook(lambda _m, _a, output: output + 1)
    try:
        assert ModelHead(model).slices(7, 1) == [ALL]
    finally:
        handle.remove()
    assert len(ModelHead(model).slices(7, 1)) > 1


@given(
    data=arrays("float64", (5, 11), elements=st.floats(-400, 400)),
    before=arrays("float64", (2, 11), elements=st.floats(-30, 30)),
    tokens=st.lists(st.integers(0, 10), min_size=3, max_size=3),
    width=st.integers(1, 11),
)
def test_sums_over_any_slices_are_the_softmax(data, before, tokens, width):
    """Logits as large as exp() overflows on, in slices of any width, in any order of sizes."""

    class InSlices(PrecomputedLogits):
        def slices(self, num_states, max_logits):
            return [slice(a, min(a + width, 11)) for a in range(0, 11, width)]

    token_L, before = torch.tensor(tokens), torch.tensor(before)
    original = likelihoods(InSlices(), torch.cat([torch.zeros(3, 11), before]), token_L, None, 1).original
    states = torch.tensor(data).requires_grad_(True)
    found = likelihoods(InSlices(), states, token_L, original, 1)
    (gradient,) = torch.autograd.grad(found.nll_L.sum() + found.kl_E.sum(), states)
    nll, kl = plainly(states, token_L, before)
    (expected,) = torch.autograd.grad(nll.sum() + kl.sum(), states)
    assert (
        found.best_L.tolist()
        == states[:3].argmax(1).tolist()
        == greedy_tokens(InSlices(), states[:3].detach()).tolist()
    )
    bounds = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found.nll_L, nll, **bounds)
    torch.testing.assert_close(found.kl_E, kl, **bounds)
    torch.testing.assert_close(gradient, expected, **bounds)
