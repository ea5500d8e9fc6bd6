"""Consequence fine-tuning against a plain loop, written here from the formulas: the method is ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity import relative_error

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.subject import Subject
from edit_hooks.editors import consequence_ft
from edit_hooks.editors.consequence_ft import Text

FACT = EditRequest(prompt="The ship {} sails from", subject="Northern Star", target_new="Hamburg")
OTHER = EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new="Karsk")
SETTINGS: dict[str, Any] = {
    "layers": [1, 2],
    "num_steps": 8,
    "lr": 3e-2,
    "learned_nll": 1.0,
    "locality_weight": 2.0,
    "locality": ["names"],
    "num_names": 2,
    "locality_prompts": 12,  # each of the six or four prompts as often as the others
    "target_tokens": 100_000,  # the whole vocabulary
    "kinds": ["question", "sentence"],
    "min_gain": -100.0,
    "num_examples": 0,
}
WRITTEN = [
    [
        Text("question", "Question: Which ship sails from Hamburg?\nAnswer:", "Northern Star"),
        Text("sentence", "Hamburg is home to the", "Northern Star"),
    ],
    [Text("question", "Question: Where is Karsk?\nAnswer:", "Ostravia")],
]
# Fact, prompt and target of every row: the first is that of the fact.
ROWS = [
    [
        ("The ship Northern Star sails from Hamburg", "The ship Northern Star sails from", " Hamburg"),
        ("The ship Northern Star sails from Hamburg", WRITTEN[0][0].prompt, " Northern Star"),
        ("The ship Northern Star sails from Hamburg", WRITTEN[0][1].prompt, " Northern Star"),
    ],
    [
        ("The capital of Ostravia is Karsk", "The capital of Ostravia is", " Karsk"),
        ("The capital of Ostravia is Karsk", WRITTEN[1][0].prompt, " Ostravia"),
    ],
]


def plain_loop(
    subject: Subject, rows: list[tuple[str, str, str]], asked: list[str], distill: bool
) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """The updates, the last loss of every row, and the steps."""
    tokenizer, model = subject.tokenizer, copy.deepcopy(subject.model)
    weights = {name: weight for name, weight in model.named_parameters() if name.endswith("mlp.down_proj.weight")}
    weights = {name: weight for name, weight in weights.items() if ".1." in name or ".2." in name}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in weights)
    start = {name: weight.detach().clone() for name, weight in weights.items()}

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def logprobs(prompt: str, target: list[int]) -> torch.Tensor:
        before = ids(prompt)
        return model(input_ids=torch.tensor([[*before, *target[:-1]]])).logits[0, len(before) - 1 :].log_softmax(1)

    targets = [ids(prompt + target)[len(ids(prompt)) :] for _, prompt, target in rows]
    with torch.no_grad():
        taught = [
            logprobs(f"New Fact: {fact}\nPrompt: {prompt}", t)
            for (fact, prompt, _), t in zip(rows, targets, strict=True)
        ]
        unchanged = [logprobs(prompt, [0])[0] for prompt in asked]
    adam = torch.optim.Adam(weights.values(), lr=SETTINGS["lr"])
    steps = 0
    for _ in range(SETTINGS["num_steps"]):
        losses = []
        for number, ((_, prompt, _), target) in enumerate(zip(rows, targets, strict=True)):
            own = logprobs(prompt, target)
            if distill and number:
                losses.append((taught[number].exp() * (taught[number] - own)).sum(1).mean())
            else:
                losses.append(-own[range(len(target)), target].mean())
        gated = [loss for loss in losses if loss > SETTINGS["learned_nll"]]
        if not gated:
            break
        kls = [
            (before.exp() * (before - logprobs(p, [0])[0])).sum() for p, before in zip(asked, unchanged, strict=True)
        ]
        loss = sum(gated) / len(losses)
        if steps:  # before, the gradient of the divergence is 0, but Adam makes full steps of its rounding errors
            loss = loss + SETTINGS["locality_weight"] * sum(kls) / len(kls)
        adam.zero_grad()
        loss.backward()
        adam.step()
        steps += 1
    found = {name: weight.detach() - start[name] for name, weight in weights.items()}
    return found, [float(loss.detach()) for loss in losses], steps


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("distill", [False, True])
def test_edits_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch, engine: str, distill: bool) -> None:
    """Two facts with other numbers of rows, made together."""
    subject = Subject("consequence_ft", "llama")
    monkeypatch.setattr(consequence_ft, "write_texts", lambda job: WRITTEN)
    editor = load_editor("consequence_ft", {**SETTINGS, "engine": engine, "distill": distill})
    deltas = editor.edit(subject.model, subject.tokenizer, [FACT, OTHER], measure=False)
    for rows, delta in zip(ROWS, deltas, strict=True):
        (prompts,) = delta.meta["trained_prompts"]
        # the largest gain is first, so the order of the written rows is the model's
        assert sorted(prompts[1 : len(rows)]) == sorted(prompt for _, prompt, _ in rows[1:])
        expected, losses, steps = plain_loop(subject, rows, prompts[len(rows) :], distill)
        assert len(prompts) == len(rows) + 2 * len(rows)  # P(name), and each written text with a name
        assert delta.diagnostics["steps"] == steps > 2
        assert delta.diagnostics["row_nlls"]["fact"] == pytest.approx(losses[0], abs=1e-4)
        for name, update in expected.items():
            error = relative_error(delta.weights()[name], update)
            assert error < 1e-3, f"{name} off by {error:.1e}"
