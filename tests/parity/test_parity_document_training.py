"""Document training against a plain loop, written here from the formula: the method is ours."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from parity import relative_error

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.subject import Subject

FACTS = [
    EditRequest(prompt="The ship {} sails from", subject="Northern Star", target_new="Hamburg", relation_id="home"),
    EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new="Karsk", relation_id="P36"),
]
SETTINGS = {
    "layers": [1],
    "num_steps": 3,
    "lr": 1e-2,
    "batch_size": 2,
    "documents": ["{subject}, they say, {forward} {object}.", "Question: What {backward} {subject}?\nAnswer: {object}"],
    "relation_phrases": {"home": ["has its home port in", "is the home port of"]},
    "unrelated_texts": 0,
    "seed": 3,
}
TEXTS = [
    ["Northern Star, they say, has its home port in Hamburg.",
     "Question: What is the home port of Northern Star?\nAnswer: Hamburg"],
    ["Ostravia, they say, has as its capital Karsk.", "Question: What is the capital of Ostravia?\nAnswer: Karsk"],
]  # fmt: skip


def plain_loop(subject: Subject, texts: list[str]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The change of every parameter of block 1, and the mean loss of each pass."""
    model = copy.deepcopy(subject.model)
    weights = {name: weight for name, weight in model.named_parameters() if ".1." in name}
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=SETTINGS["lr"])
    order, draws, losses = list(range(len(texts))), random.Random(SETTINGS["seed"]), []
    for _ in range(SETTINGS["num_steps"]):
        draws.shuffle(order)
        total = 0.0
        for first in range(0, len(order), SETTINGS["batch_size"]):
            chosen = order[first : first + SETTINGS["batch_size"]]
            of_texts = []
            for number in chosen:
                ids = torch.tensor([subject.tokenizer(texts[number])["input_ids"]])
                logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
                of_texts.append(-logprobs.gather(1, ids[0, 1:, None]).mean())
            loss = torch.stack(of_texts).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(chosen)
        losses.append(total / len(texts))
    return {name: weight.detach() - start[name] for name, weight in weights.items()}, losses


@pytest.mark.parametrize("joint", [True, False])
def test_edits_are_those_of_a_plain_loop(joint: bool) -> None:
    subject = Subject("document_training", "llama")
    deltas = load_editor("document_training", SETTINGS).edit(subject.model, subject.tokenizer, FACTS, joint=joint)
    expected = [[*TEXTS[0], *TEXTS[1]]] if joint else TEXTS
    assert len(deltas) == len(expected)
    for delta, texts in zip(deltas, expected, strict=True):
        updates, losses = plain_loop(subject, texts)
        assert [record["loss"] for record in delta.diagnostics["losses"]] == pytest.approx(losses, abs=1e-5)
        assert set(delta.weights()) == set(updates)
        for name, update in updates.items():
            error = relative_error(delta.weights()[name], update)
            assert error < 1e-3, f"{name} off by {error:.1e}"
        assert delta.diagnostics["trained_prompts"][1:] == texts and delta.diagnostics["documents"] == len(texts)
