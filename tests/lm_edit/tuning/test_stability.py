"""Stability near the edit prompt: what it measures, and that a search rewards the term that keeps it."""

from __future__ import annotations

import math

import pytest
import torch
from tuning_cases import CASES, tune

from edit_hooks import Delta, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.inference.effects.distributions import NoisyPrompt, next_token_log_probs
from edit_hooks.inference.items import Limits
from lm_edit.tuning.stability import MIN_DISTANCE, NearbyPrompts, _divergence

REQUESTS = [case.request for case in CASES]


@pytest.fixture(scope="module")
def tiny():
    return build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")


@pytest.fixture(scope="module")
def deltas(tiny):
    return load_editor("ft_m", {"layers": [EDIT_LAYER], "num_steps": 4, "lr": 0.01}).edit(*tiny, REQUESTS)


@torch.no_grad()
def plain(model, prompt):
    """Log-probabilities after a prompt from one forward on perturbed embeddings."""
    embeddings = model.get_input_embeddings()(torch.tensor([prompt.ids]))
    noise = 0.0 if prompt.noise_TD is None else prompt.noise_TD.to(embeddings)
    return model(inputs_embeds=embeddings + noise).logits[0, -1].log_softmax(0)


def test_it_is_that_of_plain_forwards_on_patched_weights(tiny, deltas):
    model, _ = tiny
    nearby = NearbyPrompts(*tiny, seed=0)
    for request, delta, found in zip(REQUESTS, deltas, nearby.stabilities(REQUESTS, deltas), strict=True):
        shares = []
        for instance in nearby._of(request):
            before = plain(model, instance.prompt)
            with edited(model, delta):
                after = plain(model, instance.prompt)
            top = before.topk(100).indices
            p, q = (row[top].exp() for row in (before, after))
            rest = (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
            shares.append(math.exp(-float((p * (p / q).log()).sum() + rest)))
        assert len(shares) == 6 and found == pytest.approx(sum(shares) / len(shares), rel=1e-5)
        assert 0 < found < 1


def test_no_edit_keeps_all_and_larger_edits_keep_less(tiny, deltas):
    nearby = NearbyPrompts(*tiny, seed=0)
    assert nearby.stabilities(REQUESTS, [None] * 3) == pytest.approx([1.0] * 3)
    large = [Delta(dense={name: 10 * update for name, update in delta.dense.items()}) for delta in deltas]
    small, less = nearby.stabilities(REQUESTS, deltas), nearby.stabilities(REQUESTS, large)
    assert all(after < before for before, after in zip(small, less, strict=True))
    broken = [Delta(dense={name: update * math.inf for name, update in delta.dense.items()}) for delta in deltas]
    assert nearby.stabilities(REQUESTS, broken) == [0.0] * 3


def test_instances_are_the_same_for_all_candidates_and_differ_from_the_prompt(tiny):
    first, again, other = (NearbyPrompts(*tiny, seed=seed)._of(REQUESTS[0]) for seed in (0, 0, 1))
    assert all(torch.equal(a.prompt.noise_TD, b.prompt.noise_TD) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].prompt.noise_TD, other[0].prompt.noise_TD)
    (at_prompt,) = next_token_log_probs(tiny[0], [(NoisyPrompt(first[0].prompt.ids), None)], Limits())
    assert all(_divergence(at_prompt, instance.log_probs_V) >= MIN_DISTANCE for instance in first)


def test_instances_that_coincide_with_the_prompt_are_left_out(tiny, monkeypatch):
    monkeypatch.setattr("lm_edit.tuning.stability.NOISE_RATIOS", (1e-4,))
    nearby = NearbyPrompts(*tiny, seed=0)
    assert nearby.stabilities(REQUESTS[:1], [None]) == [None]


def test_requests_without_a_subject_have_instances_too(tiny):
    request = EditRequest(prompt="The harbour lies in", target_new="Rome")
    assert NearbyPrompts(*tiny, seed=0).stabilities([request], [None]) == pytest.approx([1.0])


def test_the_term_that_keeps_answers_near_the_prompt_is_rewarded(tiny):
    """EVK-Align: the more weight it has, the more stable the answers; at sigma 0 it asks for the old answer."""
    settings = {"layers": [EDIT_LAYER], "num_steps": 15, "context_templates": CONTEXT_TEMPLATES[:1], "kl_factor": 0.0}
    evk = {**settings, "evk_align": True, "evk_instances": 6, "evk_top_k": [400, 400], "evk_sigma": 0.4}
    candidates = [settings, {**evk, "evk_weight": 1.0}, {**evk, "evk_weight": 5.0}]
    trials = tune(tiny, "r_rome", [*candidates, {**evk, "evk_weight": 20.0, "evk_sigma": 0.0}], CASES, halving=False)
    by_weight = [next(trial for trial in trials if trial.settings == candidate) for candidate in candidates]
    stabilities = [trial.mean("stability") for trial in by_weight]
    assert stabilities == sorted(set(stabilities))
    assert trials[-1].settings.get("evk_sigma") == 0.0 or trials[-1].score == 0.0
    assert by_weight[0].gain > 0 and by_weight[0].rank > trials[-1].rank
