"""Losses over vocabulary slices: values and gradients equal those of all logits at once, on every family."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from value_problems import each_model, keep_wide, loaded, relative

from edit_hooks.contract.tiny_models import build_model
from edit_hooks.modeling.forward import lm_head, vocab_loss
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, ModelHead, PrecomputedLogits
from edit_hooks.modeling.forward.vocab_loss import greedy_tokens, log_likelihoods, top_tokens, vocab_losses

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


def losses_by_definition(logits_NV, token_L, original_EV):
    """NLL and KL from the log-softmax."""
    log_p_NV = logits_NV.log_softmax(1)
    nll_L = -log_p_NV[range(len(token_L)), token_L]
    log_p_EV = log_p_NV[len(token_L) :]
    return nll_L, (log_p_EV.exp() * (log_p_EV - original_EV.log_softmax(1))).sum(1)


def random_states(model, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, model.config.hidden_size, generator=generator, dtype=torch.float64)


@each_model
@pytest.mark.parametrize("min_width", [5, 2048])
def test_losses_and_gradients_equal_those_of_all_logits(model_type, min_width, monkeypatch):
    model, _ = loaded(model_type)
    monkeypatch.setattr(lm_head, "MIN_SLICE_WIDTH", min_width)
    head = ModelHead(model)
    assert (len(head.slices(7, 1)) > 1) == (min_width < head.vocab_size)
    token_L = torch.tensor([3, 9, 3, head.vocab_size - 1, 0])
    first = vocab_losses(head, random_states(model, 7, 0), token_L, None, 1)
    torch.testing.assert_close(first.kl_E, torch.zeros_like(first.kl_E))
    states = random_states(model, 7, 1).requires_grad_(True)
    losses = vocab_losses(head, states, token_L, first.original, 1)
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((torch.cat([losses.nll_L, losses.kl_E]) * weights).sum(), states)

    logits = head.logits(states, WHOLE_VOCAB)
    original = head.logits(random_states(model, 7, 0)[5:], WHOLE_VOCAB).detach()
    nll, kl = losses_by_definition(logits, token_L, original)
    (expected,) = torch.autograd.grad((torch.cat([nll, kl]) * weights).sum(), states)
    torch.testing.assert_close(losses.nll_L, nll, **TOLERANCE)
    torch.testing.assert_close(losses.kl_E, kl, **TOLERANCE)
    torch.testing.assert_close(gradient, expected, **TOLERANCE)
    best = logits[:5].argmax(1).tolist()
    assert losses.argmax_L.tolist() == best == greedy_tokens(head, states[:5].detach()).tolist()
    log_p, argmax = log_likelihoods(head, states[:5].detach(), token_L)
    torch.testing.assert_close(log_p, -nll.detach(), **TOLERANCE)
    assert argmax.tolist() == best


def test_gradients_are_computed_on_demand_only():
    """Not for states without gradients, under ``no_grad``, or where the caller skips them."""
    model, _ = loaded("llama")
    head, token_L = ModelHead(model), torch.tensor([3, 9])
    plain, differentiable = random_states(model, 3, 1), random_states(model, 3, 1).requires_grad_(True)
    losses = [vocab_losses(head, plain, token_L, None, 1), vocab_losses(head, differentiable, token_L, None, 1, False)]
    with torch.no_grad():
        losses.append(vocab_losses(head, differentiable, token_L, None, 1))
    assert not any(loss.nll_L.requires_grad or loss.kl_E.requires_grad for loss in losses)
    assert vocab_losses(head, differentiable, token_L, None, 1).nll_L.requires_grad


@each_model
def test_top_tokens_have_the_largest_logits(model_type):
    model, _ = loaded(model_type)
    head, states = ModelHead(model), random_states(model, 3, 2)
    largest, tokens = top_tokens(head, states, 4)
    torch.testing.assert_close(head.logits(states, tokens), largest, **TOLERANCE)
    assert tokens[:, 0].tolist() == greedy_tokens(head, states).tolist()
    assert top_tokens(head, states, 10**6)[1].shape == (3, head.vocab_size)


@pytest.mark.parametrize("confidence", [12.0, 27.0])
def test_gradients_survive_half_precision(confidence):
    """A nearly certain target and logits that all moved alike: the remainder is small and must not drown in rounding.

    The same weights and states in bfloat16 and in float64; the logits' own rounding leaves a few percent.
    """
    generator = torch.Generator().manual_seed(0)
    models = [build_model("llama", dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    weight_VD = torch.randn(models[0].get_output_embeddings().weight.shape, generator=generator)
    weight_VD[:, 0] = 1  # along this direction all logits move alike
    token_L = torch.tensor([7, 11])
    toward_LD = weight_VD[token_L]
    before_ND = torch.randn(4, weight_VD.shape[1], generator=generator) * 0.2
    before_ND[:2] += confidence * toward_LD / toward_LD.square().sum(1, keepdim=True)
    after_ND = before_ND + torch.randn(before_ND.shape, generator=generator) * 0.05
    after_ND[:, 0] += 8

    def gradients(model):
        head = ModelHead(model)
        with torch.no_grad():
            head.module.weight.copy_(weight_VD.bfloat16())
        before, after = (states.bfloat16().to(head.module.weight.dtype) for states in (before_ND, after_ND))
        original = vocab_losses(head, before, token_L, None, 1).original
        losses = vocab_losses(head, after.requires_grad_(True), token_L, original, 1)
        return [torch.autograd.grad(loss.sum(), after, retain_graph=True)[0] for loss in (losses.nll_L, losses.kl_E)]

    for half, exact in zip(*map(gradients, models), strict=True):
        assert float(exact.norm()) > 1e-5
        assert relative(half.double(), exact) < 0.06


def test_many_states_are_scored_in_chunks(monkeypatch):
    model, _ = loaded("llama")
    head, states = ModelHead(model), random_states(model, 5, 3)
    token_L = torch.tensor([3, 9, 4, 1, 0])
    whole = log_likelihoods(head, states, token_L)
    sizes = []
    slices = ModelHead.slices
    monkeypatch.setattr(ModelHead, "slices", lambda self, count, most: sizes.append(count) or slices(self, count, most))
    monkeypatch.setattr(vocab_loss, "MAX_STATES", 2)
    for ours, theirs in zip(log_likelihoods(head, states, token_L), whole, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert sizes == [2, 2, 1]


@given(
    logits=arrays("float64", (5, 11), elements=st.floats(-400, 400)),
    original_logits=arrays("float64", (2, 11), elements=st.floats(-30, 30)),
    tokens=st.lists(st.integers(0, 10), min_size=3, max_size=3),
    width=st.integers(1, 11),
)
def test_any_slicing_gives_the_softmax(logits, original_logits, tokens, width):
    """Logits so large that exp() overflows, in slices of any width, in any order of sizes."""

    class InSlices(PrecomputedLogits):
        def slices(self, num_states, max_logits):
            return [slice(start, min(start + width, 11)) for start in range(0, 11, width)]

    token_L, original_EV = torch.tensor(tokens), torch.tensor(original_logits)
    original = vocab_losses(InSlices(), torch.cat([torch.zeros(3, 11), original_EV]), token_L, None, 1).original
    states = torch.tensor(logits).requires_grad_(True)
    losses = vocab_losses(InSlices(), states, token_L, original, 1)
    (gradient,) = torch.autograd.grad(losses.nll_L.sum() + losses.kl_E.sum(), states)
    nll, kl = losses_by_definition(states, token_L, original_EV)
    (expected,) = torch.autograd.grad(nll.sum() + kl.sum(), states)
    best = states[:3].argmax(1).tolist()
    assert losses.argmax_L.tolist() == best == greedy_tokens(InSlices(), states[:3].detach()).tolist()
    bounds = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(losses.nll_L, nll, **bounds)
    torch.testing.assert_close(losses.kl_E, kl, **bounds)
    torch.testing.assert_close(gradient, expected, **bounds)
