"""DEFER's own rules: the query in training and in use, streams that train on, edits without effect."""

from __future__ import annotations

import logging

import pytest
import torch
from hook_edits import EDIT_REQUESTS, generate_item, loaded, make, nll, score_item, stream_of, texts

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.gradient import side_by_side
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.memory.gated_predictor import GatedPredictor
from edit_hooks.modeling.hooks import hooks, on_input

REQUEST = EDIT_REQUESTS[0]


def edit(model_type: str, *requests: EditRequest, dtype: torch.dtype = torch.float32, **overrides) -> tuple[Delta, ...]:
    model, tokenizer = loaded(model_type, dtype)
    return tuple(make("defer", **overrides).edit(model, tokenizer, list(requests or [REQUEST])))


def query_at_prompt_end(model, tokenizer, delta: Delta, text: str) -> torch.Tensor:
    """Input [1, F] of the hooked map at the last token of a prompt."""
    seen: dict[str, torch.Tensor] = {}
    module = model.get_submodule(delta.hook_edit.settings["module"])
    with torch.no_grad(), hooks(on_input(module, lambda hidden: seen.update(x=hidden[:, -1]))):
        model(torch.tensor([tokenizer(text)["input_ids"]]))
    return seen["x"]


@pytest.mark.parametrize("query_token", ["last_prompt", "last_text"])
def test_the_recorded_gate_is_that_of_the_edits_own_prompt(query_token):
    """Also where training had another query: prompts are looked up by their last token."""
    model, tokenizer = loaded("llama")
    for request, delta in zip(EDIT_REQUESTS, edit("llama", *EDIT_REQUESTS, query_token=query_token), strict=True):
        predictor = GatedPredictor(**delta.hook_edit.tensors)
        gate = predictor.gate(query_at_prompt_end(model, tokenizer, delta, request.text))
        assert delta.diagnostics["gate"] == pytest.approx(float(gate), abs=1e-5)


def test_an_edit_whose_gate_stays_closed_changes_nothing_and_warns(caplog):
    """Steps that are too large: the gate closes before the value helps, and then nothing is trained."""
    model, tokenizer = loaded("gpt2")
    with caplog.at_level(logging.WARNING):
        closed, opened = (edit("gpt2", lr=lr)[0] for lr in (0.3, 0.015))
    assert closed.diagnostics["gate"] < 0.5 < opened.diagnostics["gate"]
    (warning,) = closed.warnings
    assert "below the threshold" in warning and warning in caplog.text and not opened.warnings
    ids = torch.tensor([tokenizer(REQUEST.text)["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        for delta, is_same in ((closed, True), (opened, False)):
            with edited(model, delta):
                assert torch.equal(model(ids).logits, plain) == is_same


def test_the_threshold_decides_in_use_alone():
    low, high = (edit("llama", threshold=threshold)[0] for threshold in (0.01, 0.99))
    for name, tensor in low.hook_edit.tensors.items():
        assert torch.equal(high.hook_edit.tensors[name], tensor)
    model, tokenizer = loaded("llama")
    assert (
        nll(model, tokenizer, REQUEST, low)
        < nll(model, tokenizer, REQUEST, high)
        == nll(model, tokenizer, REQUEST, None)
    )


def test_a_stream_trains_on_and_is_its_last_step():
    model, tokenizer = loaded("llama")
    steps = stream_of("defer", model, tokenizer, EDIT_REQUESTS)
    total = Delta.summed(steps).hook_edit
    assert all(torch.equal(tensor, steps[-1].hook_edit.tensors[name]) for name, tensor in total.tensors.items())
    # One step of Adam with a vanishing rate leaves the second edit where the first one ended.
    (still,) = make("defer", num_steps=1, lr=1e-12).edit(model, tokenizer, EDIT_REQUESTS[1:2], history=steps[:1])
    for name, tensor in still.hook_edit.tensors.items():
        torch.testing.assert_close(tensor, steps[0].hook_edit.tensors[name], atol=1e-9, rtol=1e-6)


def test_a_stream_forgets():
    """Nothing holds the first edit; with a step that is large enough the second one takes its place."""
    model, tokenizer = loaded("llama")
    steps = stream_of("defer", model, tokenizer, EDIT_REQUESTS, num_steps=20)
    first = nll(model, tokenizer, REQUEST, steps[0])
    assert nll(model, tokenizer, REQUEST, Delta.summed(steps)) > first + 0.3


def test_new_tokens_have_the_prompts_value_or_their_own():
    """Under each look-up, teacher forcing of the decoded text gives the decoded tokens."""
    model, tokenizer = loaded("llama")
    item = generate_item(tokenizer, REQUEST.text, 10)
    written = []
    for query in ("prefill", "every_step"):
        (delta,) = edit("llama", query=query)
        (text,) = texts(model, tokenizer, [(item, delta)])
        (answer,) = score(model, [(ScoreItem(item.context, tuple(text)), delta)], Limits(), lambda count: None)
        assert answer.is_greedy
        written.append(text)
    assert written[0] != written[1]


def test_the_query_of_the_text_runs_its_last_token():
    """The context must have room for it, and the edit is another one."""
    first, other = (edit("llama", query_token=token)[0] for token in ("last_prompt", "last_text"))
    assert first.diagnostics["losses"] != other.diagnostics["losses"]
    counts = {
        (token, eos): load_editor("defer", {"query_token": token, "append_eos": eos}).num_tokens_past_target()
        for token in ("last_prompt", "last_text")
        for eos in (False, True)
    }
    assert list(counts.values()) == [0, 1, 1, 2]


def test_append_eos_trains_the_end_of_text():
    first, other = (edit("llama", append_eos=eos)[0] for eos in (False, True))
    assert first.diagnostics["initial_nll"] != other.diagnostics["initial_nll"]


def test_batches_are_bounded_by_memory_and_give_the_same_edits(monkeypatch):
    together = edit("llama", *EDIT_REQUESTS)
    sizes = []
    make_adam = side_by_side.make_adam

    def recorded(leaves, *rest):
        sizes.append(sum(len(leaf) for leaf in leaves) // 4)
        return make_adam(leaves, *rest)

    monkeypatch.setattr("edit_hooks.editors.defer.make_adam", recorded)
    edit("llama", *EDIT_REQUESTS)
    monkeypatch.setattr(side_by_side, "memory_budget", lambda model: 1)
    alone = edit("llama", *EDIT_REQUESTS)
    assert sizes == [4, 1, 1, 1, 1]
    for ours, theirs in zip(alone, together, strict=True):
        for name, tensor in ours.hook_edit.tensors.items():
            torch.testing.assert_close(tensor, theirs.hook_edit.tensors[name], atol=1e-4, rtol=1e-4)


def test_in_half_precision_gate_and_predictor_are_float32():
    model, tokenizer = loaded("llama", torch.bfloat16)
    (delta,) = edit("llama", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in delta.hook_edit.tensors.values()} == {torch.float32}
    (answer,) = score(model, [(score_item(tokenizer, REQUEST), delta)], Limits(), lambda count: None)
    (plain,) = score(model, [(score_item(tokenizer, REQUEST), None)], Limits(), lambda count: None)
    assert answer.logprob > plain.logprob + 0.5


def test_the_input_projection_of_an_mlp_without_gate():
    model, tokenizer = loaded("gpt2")
    (delta,) = edit("gpt2", module="mlp_in")
    assert delta.hook_edit.settings["module"].endswith("c_fc")
    assert nll(model, tokenizer, REQUEST, delta) < nll(model, tokenizer, REQUEST, None) - 0.5
    with pytest.raises(EditingError, match="gated"):
        edit("llama", module="mlp_in")


def test_wrong_use_is_refused():
    model, tokenizer = loaded("gpt2")
    history = list(edit("gpt2"))
    with pytest.raises(EditingError, match="not a gate and predictor at"):
        make("defer", module="mlp_in").edit(model, tokenizer, [REQUEST], history=history)
    with pytest.raises(EditingError, match="not a gate and predictor at"):
        make("defer").edit(model, tokenizer, [REQUEST], history=make("grace").edit(model, tokenizer, [REQUEST]))
    with pytest.raises(EditingError, match="one layer"):
        load_editor("defer", {"layers": [0, 1]})
    with pytest.raises(EditingError, match="between 0 and 1"):
        load_editor("defer", {"threshold": 1.0})
