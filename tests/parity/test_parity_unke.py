"""UnKE against the numbers of its release: states, the loss of every step, all parameters of the blocks."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_names
from parity_answers import answer_settings, check_answers, fit_settings

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.subject import EDIT_REQUESTS, contract_settings
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.editors.unke import UnKE
from edit_hooks.locate.answer_windows import answer_of
from edit_hooks.locate.value_editor import UNLIKELY_TARGET_WARNING


@pytest.mark.parametrize(("model_name", "name"), golden_names("unke"))
def test_edits_give_the_numbers_of_the_release(model_name, name, golden_model):
    """Single edits, a batch of three, and two blocks."""
    model, tokenizer = golden_model(model_name, torch.float64 if name.endswith("float64") else torch.float32)
    case, _ = golden_case("unke", model_name, name)
    delta = check_answers("unke", (model_name, model, tokenizer), name, **fit_settings(case))
    assert delta.diagnostics["num_windows"] == len(case["requests"])
    assert delta.warnings == [UNLIKELY_TARGET_WARNING]  # its answers stay above 6 nats per token


def test_preserved_texts_lose_nothing_at_first(golden_model):
    """The loss of the first step is that of the questions alone, so it is the same for any texts."""
    model, tokenizer = golden_model("tiny-llama", torch.float64)
    case, _ = golden_case("unke", "tiny-llama", "edit0-float64")
    request = EditRequest(prompt=case["requests"][0]["question"], target_new=case["requests"][0]["answer"])
    losses = []
    for texts in (["A short text."], ["Another one.", "And one that is longer."]):
        settings = {**answer_settings(case), **fit_settings(case), "fit_steps": 2, "preserved_texts": texts}
        (delta,) = load_editor("unke", settings).edit(model, tokenizer, [request], measure=False)
        losses.append(delta.diagnostics["fits"][0]["losses"])
    (first, one), (again, other) = losses
    assert first == pytest.approx(again, rel=1e-12) and one != pytest.approx(other, rel=1e-6)


def test_texts_are_cut_at_the_context(golden_model):
    """Tokens behind the last position would have no embedding."""
    model, tokenizer = golden_model("tiny-gpt2")
    request = EditRequest(prompt="Who made it?", target_new="Nintendo in Kyoto")
    settings = {"layers": [1], "num_steps": 2, "fit_steps": 1, "preserved_texts": ["one two three " * 200]}
    (delta,) = load_editor("unke", settings).edit(model, tokenizer, [request], measure=False)
    assert all(bool(torch.isfinite(update).all()) for update in delta.weights().values())


@torch.no_grad()
def test_the_state_moves_towards_its_target():
    """Two blocks, half of the way each, on a layout that has no golden numbers."""
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe_bos")
    settings = {**contract_settings(UnKE), "layers": [0, 1], "fit_steps": 25, "num_steps": 12}
    editor = load_editor("unke", settings)
    request = EDIT_REQUESTS[0]
    (delta,) = editor.edit(model, tokenizer, [request], measure=False)
    first, second = (fit["losses"] for fit in delta.diagnostics["fits"])
    assert first[-1] < first[0] / 4 and second[-1] < second[0] / 4
    answer = answer_of(tokenizer, request, True, None, 0)
    (labels,) = (torch.tensor(answer.ids[answer.windows[0].start :]),)

    def nll():
        logits = model(torch.tensor([answer.ids])).logits[0, answer.windows[0].start - 1 : -1]
        return float(torch.nn.functional.cross_entropy(logits.float(), labels))

    before = nll()
    with edited(model, delta):
        assert nll() < before - 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preserved_texts": []}, "needs at least one text"),
        ({"preserved_texts": ["text", " "]}, "none that is empty"),
        ({"layers": [2, 1]}, "in ascending order"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(EditingError, match=message):
        load_editor("unke", settings).default_config(build_model("llama"))
