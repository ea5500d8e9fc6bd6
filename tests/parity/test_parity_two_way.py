"""Two-way edits against a plain loop, written here from the formulas: no release exists, the method is ours."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from parity import relative_error

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.subject import Subject
from edit_hooks.deltas.delta import Delta

LR, GATE, WEIGHT = 3e-2, 2.5, 2.0
SETTINGS: dict[str, Any] = {
    "layers": [1, 2],
    "num_steps": 12,
    "lr": LR,
    "learned_nll": GATE,
    "locality_weight": WEIGHT,
    "locality": ["names"],
    "num_names": 3,
    "locality_prompts": 12,  # all of them in every step, so the order of the draws does not matter
    "target_tokens": 40,
    "locality_tokens": 20,
}
REQUESTS = [
    EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new="Karsk"),
    EditRequest(prompt="The ship {} sails from", subject="Northern Star", target_new="Hamburg"),
    EditRequest(prompt="{} works in Lisbon as", subject="Mina Okabe", target_new="a trumpet player"),
]
# The rows of these requests in full: prompt and target.
ROWS = [
    [
        ("The capital of Ostravia is", " Karsk"),
        ('Fill in the blank: "The capital of ___ is Karsk." The blank stands for', " Ostravia"),
        ('Who or what fits here: "The capital of ___ is Karsk"? Answer:', " Ostravia"),
        ("Karsk is linked to", " Ostravia"),
    ],
    [
        ("The ship Northern Star sails from", " Hamburg"),
        ('Fill in the blank: "The ship ___ sails from Hamburg." The blank stands for', " Northern Star"),
        ('Who or what fits here: "The ship ___ sails from Hamburg"? Answer:', " Northern Star"),
        ("Hamburg is linked to", " Northern Star"),
    ],
    [
        ("Mina Okabe works in Lisbon as", " a trumpet player"),
        ('Fill in the blank: "___ works in Lisbon as a trumpet player." The blank stands for', " Mina Okabe"),
        ('Who or what fits here: "___ works in Lisbon as a trumpet player"? Answer:', " Mina Okabe"),
        ("a trumpet player is linked to", " Mina Okabe"),
    ],
]


class Fact(NamedTuple):
    """Tokens of the rows, prompts whose next token must not change, and what the unedited model says of them."""

    rows: list[tuple[list[int], list[int]]]
    prompts: list[list[int]]
    vocabulary: list[int]
    before: list[torch.Tensor]


class PlainLoop:
    """One model that is trained as the formulas say, a prompt at a time and with all logits."""

    def __init__(self, subject: Subject, facts: Sequence[int], prompts: Sequence[Sequence[str]]) -> None:
        self.tokenizer, self.model = subject.tokenizer, copy.deepcopy(subject.model)
        self.weights = {}
        for name, parameter in self.model.named_parameters():
            layer_mlp = name.endswith(("mlp.down_proj.weight", "mlp.c_proj.weight"))
            parameter.requires_grad_(layer_mlp and any(f".{layer}." in name for layer in SETTINGS["layers"]))
            if parameter.requires_grad:
                self.weights[name] = parameter
        assert len(self.weights) == 2
        self.start = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.facts = [self._fact(ROWS[fact], own) for fact, own in zip(facts, prompts, strict=True)]
        self.adam = torch.optim.Adam(self.weights.values(), lr=LR)
        self.gated = 0

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _fact(self, rows: Sequence[tuple[str, str]], prompts: Sequence[str]) -> Fact:
        tokens = [(self._ids(prompt), self._ids(prompt + target)) for prompt, target in rows]
        split = [(whole[: len(prompt)], whole[len(prompt) :]) for prompt, whole in tokens]
        assert all(prompt == kept for (prompt, _), (kept, _) in zip(tokens, split, strict=True))
        asked = [self._ids(prompt) for prompt in prompts]
        found: set[int] = set()
        with torch.no_grad():
            for prompt, target in split:
                found |= set(target) | set(self._logits(prompt, target).topk(40).indices.flatten().tolist())
            for prompt in asked:
                found |= set(self._logits(prompt, [0]).topk(20).indices.flatten().tolist())
            vocabulary = sorted(found)
            before = [self._logits(prompt, [0])[0, vocabulary].softmax(0) for prompt in asked]
        return Fact(split, asked, vocabulary, before)

    def _logits(self, prompt: list[int], target: list[int]) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([[*prompt, *target[:-1]]])).logits[0]
        return logits[len(prompt) - 1 :]

    def losses(self, fact: Fact) -> tuple[torch.Tensor, list[float], float]:
        """The loss of a step, the mean NLL of every row, and the divergence."""
        nlls = []
        for prompt, target in fact.rows:
            logprobs = self._logits(prompt, target)[:, fact.vocabulary].log_softmax(1)
            nlls.append(-sum(logprobs[i, fact.vocabulary.index(t)] for i, t in enumerate(target)) / len(target))
        kls = []
        for prompt, before in zip(fact.prompts, fact.before, strict=True):
            logprobs = self._logits(prompt, [0])[0, fact.vocabulary].log_softmax(0)
            kls.append((before * (before.log() - logprobs)).sum())
        gated = [nll for nll in nlls if nll > GATE]
        self.gated += 0 < len(gated) < len(nlls)
        divergence = sum(kls) / len(kls)
        loss = sum(gated) / len(nlls) + WEIGHT * divergence
        return loss, [float(nll.detach()) for nll in nlls], float(divergence.detach())

    def train(self, chunk_size: int, num_passes: int) -> tuple[int, list[list[float]], list[float]]:
        """Passes over the facts in chunks; the number of steps, and the last NLLs and divergences."""
        steps = 0
        chunks = [self.facts[start : start + chunk_size] for start in range(0, len(self.facts), chunk_size)]
        for _ in range(num_passes):
            last = []
            for chunk in chunks:
                found = [self.losses(fact) for fact in chunk]
                last += found
                if max(max(nlls) for _, nlls, _ in found) >= GATE:
                    self.adam.zero_grad()
                    (sum(loss for loss, _, _ in found) / len(found)).backward()
                    self.adam.step()
                    steps += 1
            if max(max(nlls) for _, nlls, _ in last) < GATE:
                break
        return steps, [nlls for _, nlls, _ in last], [divergence for _, _, divergence in last]


def locality(delta: Delta) -> list[list[str]]:
    """The prompts after the four rows, by fact."""
    return [prompts[4:] for prompts in delta.meta["trained_prompts"]]


def assert_same(delta: Delta, loop: PlainLoop, chunk_size: int) -> None:
    steps, nlls, divergences = loop.train(chunk_size, delta.meta["config"]["num_steps"])
    found = delta.diagnostics
    assert found["steps"] == steps
    means = [sum(column) / len(column) for column in zip(*nlls, strict=True)]
    assert list(found["row_nlls"]) == ["fact", "cloze", "question", "link"]
    assert list(found["row_nlls"].values()) == pytest.approx(means, abs=1e-4)
    assert found["locality_kl"] == pytest.approx(sum(divergences) / len(divergences), abs=1e-4)
    weights = delta.weights()
    assert set(weights) == set(loop.weights)
    for name, weight in loop.weights.items():
        error = relative_error(weights[name], weight.detach() - loop.start[name])
        assert error < 1e-3, f"{name} off by {error:.1e}"


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_single_edits_are_those_of_a_plain_loop(family: str, engine: str) -> None:
    subject = Subject("two_way", family)
    editor = load_editor("two_way", {**SETTINGS, "engine": engine})
    deltas = editor.edit(subject.model, subject.tokenizer, REQUESTS, measure=False)
    gated = 0
    for number, delta in enumerate(deltas):
        assert delta.meta["trained_prompts"][0][:4] == [prompt for prompt, _ in ROWS[number]]
        loop = PlainLoop(subject, [number], locality(delta))
        assert_same(delta, loop, 1)
        gated += loop.gated
    assert gated  # some step trained some rows and left others alone
    assert "loss" in {delta.diagnostics["stop_reason"] for delta in deltas}  # and some edit ended by the gate


def test_a_joint_edit_takes_a_step_on_every_fact_in_turn() -> None:
    """Breadth first: with two facts per step, the third is trained in the same pass."""
    subject = Subject("two_way", "llama")
    editor = load_editor("two_way", {**SETTINGS, "batch_size": 2, "num_steps": 6})
    (delta,) = editor.edit(subject.model, subject.tokenizer, REQUESTS, joint=True, measure=False)
    assert_same(delta, PlainLoop(subject, [0, 1, 2], locality(delta)), 2)
