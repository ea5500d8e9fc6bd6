"""A model spread over several devices (``device_map=auto``): every editor, and what reads an edited model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edit_runs import edits, flat, quick_settings, readings
from pretended_device import dispatch_model, move_delta, pretended_device

from edit_hooks.base.registry import EDITORS
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.modeling.forward.lm_head import ModelHead
from edit_hooks.modeling.forward.sampling import sample_texts

# The edited block is neither where the tokens come in nor where the head is.
DEVICE_MAP = {
    "model.embed_tokens": 0,
    "model.rotary_emb": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.layers.2": 2,
    "model.norm": 2,
    "lm_head": 2,
}


def spread_model() -> Any:
    model = build_model("llama")
    dispatch_model(model, DEVICE_MAP)
    return model


# Every sixth editor of the registry, whose neighbors share code; `-m slow` runs the others.
# LoRA without dropout: the masks of another device are other numbers.
NO_DROPOUT = {"dropout": 0.0}
EACH = [
    pytest.param(name, NO_DROPOUT if name == "lora" else {}, marks=[pytest.mark.slow] if row % 6 else [], id=name)
    for row, name in enumerate(EDITORS)
]


@pytest.mark.parametrize(
    ("editor", "more"), [*EACH, pytest.param("lora", {"kind": "adalora", **NO_DROPOUT}, id="adalora")]
)
def test_edits_are_those_of_one_device(editor, more):
    subject = Subject(editor, "llama")
    expected = edits(subject, subject.model, more)
    with pretended_device():
        found = [move_delta(delta, torch.Tensor.cpu) for delta in edits(subject, spread_model(), more)]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.writes == other.writes
        for name, weight in other.weights().items():
            # Worst seen: 1.1e-5, of one entry of a two-way edit, whose steps of Adam enlarge rounding.
            torch.testing.assert_close(one.weights()[name], weight, atol=2e-5, rtol=1.3e-6)


@pytest.mark.parametrize(
    "editor", ["memit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rome", "evk_edit", "bird"))]
)
def test_the_reference_engine_likewise(editor):
    subject = Subject(editor, "llama")
    settings = {**quick_settings(subject), "engine": "reference"}
    expected = subject.make(**settings).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
    with pretended_device():
        found = subject.make(**settings).edit(spread_model(), subject.tokenizer, EDIT_REQUESTS[:1])
        (local,) = (move_delta(delta, torch.Tensor.cpu) for delta in found)
    for name, weight in expected[0].weights().items():
        torch.testing.assert_close(local.weights()[name], weight)


@pytest.mark.parametrize(
    "editor",
    [
        *("memit", "wise"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("ft_m", "grace", "memoir", "melo", "defer", "neural_db")
        ),
    ],
)
def test_an_edited_model_is_read_as_on_one_device(editor):
    subject = Subject(editor, "llama")
    (delta,) = subject.make(**quick_settings(subject)).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
    engines = ("fast", "reference")
    expected = [readings(subject.model, subject.tokenizer, delta, engine) for engine in engines]
    with pretended_device():
        found = [readings(spread_model(), subject.tokenizer, delta, engine) for engine in engines]
    assert flat(found) == pytest.approx(flat(expected), abs=1e-5)


def test_second_moments_and_sampled_texts_are_those_of_one_device():
    subject = Subject("memit", "llama")
    tokenizer = subject.tokenizer

    def moments(model: Any) -> list[torch.Tensor]:
        found = second_moments(model, tokenizer, [0, 1], MomentSettings(["He speaks English."] * 4))
        return [moment.matrix_FF.cpu() for moment in found.values()]

    expected, texts = moments(subject.model), sample_texts(subject.model, tokenizer, 2, 8, 0)
    with pretended_device():
        model = spread_model()
        found = moments(model)
        assert sample_texts(model, tokenizer, 2, 8, 0) == texts
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("family", "ends_with_projection"), [("llama", True), ("gemma2", False)])
def test_the_head_of_another_device(family, ends_with_projection):
    """The hook of accelerate returns the logits on the device of the input."""
    model = build_model(family, tie_word_embeddings=False)
    states_ND = torch.linspace(-1, 1, 2 * 32).view(2, 32)
    weights_MW, state_M = torch.ones(2, 5), torch.arange(2)
    expected, vjp = ModelHead(model).logits_with_vjp(states_ND, slice(0, 5))
    expected_vjp = vjp(weights_MW, state_M)
    with pretended_device():
        dispatch_model(model, DEVICE_MAP)
        head = ModelHead(model)
        assert head.ends_with_projection == ends_with_projection
        last = torch.device("cuda", 2)
        logits, vjp = head.logits_with_vjp(states_ND.to(last), slice(0, 5))
        assert logits.device == last
        torch.testing.assert_close(logits.cpu(), expected)
        torch.testing.assert_close(vjp(weights_MW.to(last), state_M.to(last)).cpu(), expected_vjp)
