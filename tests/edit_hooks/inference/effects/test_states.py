"""Hidden states and next-token distributions under edits against own forward passes, and both similarities by hand."""

from __future__ import annotations

import copy
import hashlib
import math
from typing import Any

import pytest
import torch
from hook_edits import loaded
from inference_cases import edits, model_and_tokenizer
from random_deltas import codebook, dense_delta, masked_delta, random_delta, rewrite_name

from edit_hooks import Delta, Factor, edited
from edit_hooks.inference.effects import states as states_module
from edit_hooks.inference.effects.states import StateComparison, _cosine, _overlap, last_states
from edit_hooks.inference.items import Limits, StateItem, TokenNoise
from edit_hooks.modeling.architectures import head_of, weight_of
from edit_hooks.state_reading import NEXT_TOKEN

TEXTS = ["Port Elna is the capital of", "The old lighthouse keeper of the northern bay speaks", "Dust"]
MANY, ONE = Limits(), Limits(max_rows=1)


def items(tokenizer: Any, state: Any = "after_norm", sigma: float = 0.3) -> list[StateItem]:
    """Every text as it is, and with noise on its last token and on all tokens."""
    made = []
    for text in TEXTS:
        ids = tuple(tokenizer(text)["input_ids"])
        made.append(StateItem(ids, state))
        for name, positions in (("last", (len(ids) - 1,)), ("all", tuple(range(len(ids))))):
            made.append(StateItem(ids, state, TokenNoise(positions, sigma, f"0 {text} {name}")))
    return made


def cosines(model: Any, jobs: Any, limits: Limits = MANY, one_by_one: bool = False) -> list[float]:
    found = StateComparison(one_by_one=one_by_one).compare(model, jobs, limits, lambda _: None)
    return [value for answer in found for value in answer.values().values()]


def distributions(tokenizer: Any) -> list[StateItem]:
    return [StateItem(tuple(tokenizer(text)["input_ids"]), NEXT_TOKEN) for text in TEXTS]


def test_the_cosine_by_hand() -> None:
    # cos((3, 4), (4, 3)) = (12 + 12) / (5 * 5) = 24/25; cos((1, 0), (-2, 0)) = -1
    found = _cosine(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[4.0, 3.0], [-2.0, 0.0]]))
    assert found == [24 / 25, -1.0]
    vectors = torch.randn(200, 33, generator=torch.Generator().manual_seed(1))
    assert _cosine(vectors, vectors) == [1.0] * 200 and _cosine(vectors.bfloat16(), vectors.bfloat16()) == [1.0] * 200
    assert math.isnan(_cosine(torch.zeros(1, 2), torch.ones(1, 2))[0])


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
def test_a_hand_made_edit_by_an_own_forward_pass_in_float64(family: str) -> None:
    model, tokenizer = loaded(family, torch.float64)
    module = model.get_submodule(rewrite_name(model))
    width = weight_of(module).shape
    left = torch.linspace(-1, 1, width[0], dtype=torch.float64)[:, None]
    right = torch.linspace(0, 0.2, width[1], dtype=torch.float64)[:, None]
    delta = Delta(dense={f"{rewrite_name(model)}.weight": left @ right.T})
    other = copy.deepcopy(model)
    with torch.no_grad():
        weight_of(other.get_submodule(rewrite_name(model))).add_(left @ right.T)
    expected = []
    for item in items(tokenizer):
        before, after = (last_hidden(one, item) for one in (model, other))
        dot = math.fsum(x * y for x, y in zip(before, after, strict=True))
        norms = [math.sqrt(math.fsum(x * x for x in vector)) for vector in (before, after)]
        expected.append(dot / (norms[0] * norms[1]))
    found = cosines(model, [(item, delta) for item in items(tokenizer)])
    assert found == pytest.approx(expected, abs=1e-12)
    assert len({round(value, 6) for value in found}) == len(found) and max(found) < 0.9999


def last_hidden(model: Any, item: StateItem) -> list[float]:
    """The final norm's output at the last token, from ``inputs_embeds`` with the noise drawn here."""
    embeds = model.get_input_embeddings()(torch.tensor([item.context])).detach().clone()
    if item.noise is not None:
        seed = int.from_bytes(hashlib.sha256(item.noise.seed.encode()).digest()[:7], "big")
        drawn = torch.randn(
            len(item.noise.positions),
            embeds.shape[2],
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        embeds[0, list(item.noise.positions)] += item.noise.sigma * drawn
    with torch.no_grad():
        states = model(inputs_embeds=embeds, output_hidden_states=True).hidden_states
    return states[-1][0, -1].tolist()


@pytest.mark.parametrize("limits", [MANY, Limits(max_tokens=30, max_rows=2), ONE])
def test_batches_padding_and_kinds_of_edits_agree_with_edits_in_the_weights(limits: Limits) -> None:
    model, tokenizer = model_and_tokenizer()
    kinds = [*edits(model).values(), dense_delta(model), masked_delta(model), Delta(hook_edit=codebook(model))]
    jobs = [(item, delta) for item in items(tokenizer) for delta in kinds]
    reference = cosines(model, jobs, one_by_one=True)
    assert cosines(model, jobs, limits) == pytest.approx(reference, abs=2e-5)
    assert len(set(reference)) > len(jobs) / 2


def test_an_edit_without_effect_gives_exactly_one() -> None:
    model, tokenizer = model_and_tokenizer()
    zero = random_delta(model, scale=0.0)
    dense = Delta(dense={name: torch.zeros_like(update) for name, update in dense_delta(model).dense.items()})
    for delta in (None, zero, dense):
        assert set(cosines(model, [(item, delta) for item in items(tokenizer)])) == {1.0}
    assert isinstance(next(iter(zero.factors.values())), Factor)


def test_states_kept_before_the_edits_are_those_compared() -> None:
    """In a stream the weights are edited when questions are answered."""
    model, tokenizer = model_and_tokenizer()
    delta, comparison = dense_delta(model), StateComparison(one_by_one=False)
    asked = items(tokenizer)
    expected = cosines(model, [(item, delta) for item in asked])
    with comparison.unedited_kept(model, asked, MANY), edited(model, delta):
        found = comparison.compare(model, [(item, None) for item in asked], MANY, lambda _: None)
    assert [answer.cosine for answer in found] == pytest.approx(expected, abs=1e-12)
    assert not comparison._unedited


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_state_before_the_norm_and_those_of_blocks(family: str) -> None:
    model, tokenizer = loaded(family)
    ids = torch.tensor([tokenizer(TEXTS[1])["input_ids"]])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
        read = {
            state: last_states(model, [StateItem(tuple(ids[0].tolist()), state)], [None])[0]
            for state in (0, "before_norm", "after_norm")
        }
        torch.testing.assert_close(read[0], states[1][0, -1])
        torch.testing.assert_close(read["after_norm"], states[-1][0, -1])
        torch.testing.assert_close(norm(read["before_norm"]), read["after_norm"])


def test_noise_depends_on_its_seed_and_not_on_dtype_or_batch() -> None:
    model, tokenizer = loaded("llama")
    ids = tuple(tokenizer(TEXTS[0])["input_ids"])

    def state(seed: str, sigma: float, batch: int = 1) -> torch.Tensor:
        item = StateItem(ids, "after_norm", TokenNoise((1, 2), sigma, seed))
        padded = [StateItem((*ids, *ids), "after_norm")] * (batch - 1)
        return last_states(model, [item, *padded], [None] * batch)[0]

    first = state("a", 0.3)
    torch.testing.assert_close(state("a", 0.3, batch=3), first)
    assert not torch.allclose(state("b", 0.3), first, atol=1e-3)
    plain = last_states(model, [StateItem(ids, "after_norm")], [None])[0]
    torch.testing.assert_close(state("a", 0.0), plain)


def test_the_overlap_by_hand() -> None:
    # p = (.5, .3, .1) and a rest of .1, q = (.2, .3, .1) and .4: TV = (.3 + .3) / 2; the minima are .2 + .3 + .1 + .1
    p, q = torch.tensor([[[0.5, 0.3, 0.1]], [[0.2, 0.3, 0.1]]], dtype=torch.float64)
    assert _overlap(p.log(), q.log()) == pytest.approx([0.7], abs=1e-12)
    assert _overlap(p.log(), p.log()) == [1.0] and math.isnan(_overlap(p.log(), q.log() * math.nan)[0])


@pytest.mark.parametrize("leading", [7, 10**6])
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_distributions_by_an_own_forward_pass(family: str, leading: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the unedited model's seven likeliest tokens, and all others as one, and with the whole vocabulary."""
    monkeypatch.setattr(states_module, "LEADING", leading)
    model, tokenizer = loaded(family, torch.float64)
    delta = dense_delta(model)
    expected = []
    for item in distributions(tokenizer):
        ids = torch.tensor([item.context])
        with torch.no_grad():
            p = model(ids).logits[0, -1].softmax(0)
            with edited(model, delta):
                q = model(ids).logits[0, -1].softmax(0)
        order = p.argsort(descending=True)
        kept, rest = order[:leading].tolist(), order[leading:].tolist()
        minima = [min(float(p[token]), float(q[token])) for token in kept]
        expected.append(math.fsum(minima) + min(float(p[rest].sum()), float(q[rest].sum())))
    assert cosines(model, [(item, delta) for item in distributions(tokenizer)]) == pytest.approx(expected, abs=1e-9)
    assert len({round(value, 6) for value in expected}) == len(expected) and max(expected) < 0.9999


@pytest.mark.parametrize("limits", [MANY, ONE])
def test_distributions_agree_however_the_edit_is_applied(limits: Limits) -> None:
    model, tokenizer = model_and_tokenizer()
    head = next(name for name, module in model.named_modules() if module is head_of(model))
    changed_head = Delta(dense={f"{head}.weight": torch.full_like(weight_of(head_of(model)), 0.01).tril()})
    kinds = [*edits(model).values(), dense_delta(model), Delta(hook_edit=codebook(model)), changed_head]
    jobs = [(item, delta) for item in distributions(tokenizer) for delta in kinds]
    reference = cosines(model, jobs, one_by_one=True)
    assert cosines(model, jobs, limits) == pytest.approx(reference, abs=2e-5)
    assert set(cosines(model, [(item, None) for item in distributions(tokenizer)], limits)) == {1.0}
    asked, comparison = distributions(tokenizer), StateComparison(one_by_one=False)
    for delta in (dense_delta(model), changed_head):  # in a stream
        expected = cosines(model, [(item, delta) for item in asked])
        with comparison.unedited_kept(model, asked, MANY), edited(model, delta):
            found = comparison.compare(model, [(item, None) for item in asked], MANY, lambda _: None)
        assert [answer.overlap for answer in found] == pytest.approx(expected, abs=1e-9)
        assert max(expected) < 0.9999
