"""AnyEdit against the numbers of its release: states of all windows, the loss of every step, updates."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_names
from parity_answers import answer_settings, check_answers

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_tokenizer
from edit_hooks.locate.answer_windows import answer_of

REQUEST = EditRequest(prompt="Who plays the trumpet?\n", target_new="Toko Yasuda plays it with a quartet in Vienna.")


@pytest.mark.parametrize(("model_name", "name"), golden_names("any_edit"))
def test_edits_give_the_numbers_of_the_release(model_name, name, golden_model):
    """A single edit, a batch of two and windows that overlap."""
    model, tokenizer = golden_model(model_name, torch.float64 if name.endswith("float64") else torch.float32)
    case, _ = golden_case("any_edit", model_name, name)
    delta = check_answers("any_edit", (model_name, model, tokenizer), name, preserved_texts=case["preserved_sentences"])
    assert delta.diagnostics["num_windows"] == sum(map(len, case["positions"]))
    given = case["hparams"]
    for request, positions in zip(case["requests"], case["positions"], strict=True):
        request = EditRequest(prompt=request["question"], target_new=request["answer"])
        answer = answer_of(tokenizer, request, False, given["window_size"], given["overlap"])
        assert answer.positions == positions


def test_the_plain_loop_gives_the_same_states(golden_model):
    """Offsets of earlier windows are held in the prefix of the fast passes."""
    loaded = ("tiny-llama", *golden_model("tiny-llama", torch.float64))
    case, _ = golden_case("any_edit", "tiny-llama", "edit0-float64")
    settings = {"preserved_texts": case["preserved_sentences"], "engine": "reference"}
    check_answers("any_edit", loaded, "edit0-float64", **settings)


def test_one_window_has_the_state_of_unke(golden_model):
    model, tokenizer = golden_model("tiny-llama", torch.float64)
    case, _ = golden_case("any_edit", "tiny-llama", "edit0-float64")
    one = case["requests"][0]
    request = EditRequest(prompt=one["question"], target_new=one["answer"])
    settings = {**answer_settings(case), "early_stop_loss": 0.0, "fit_steps": 1, "preserved_texts": ["One text."]}
    (whole,) = load_editor("any_edit", {**settings, "window": 100}).edit(model, tokenizer, [request], measure=False)
    del settings["window"], settings["overlap"]
    (plain,) = load_editor("unke", settings).edit(model, tokenizer, [request], measure=False)
    torch.testing.assert_close(whole.intermediates["z.0"], plain.intermediates["z.0"], rtol=0, atol=0)


def test_windows_cover_the_answer_once():
    tokenizer = build_tokenizer("byte_bpe_bos")
    whole = answer_of(tokenizer, REQUEST, True, None, 0)
    start, stop = whole.windows[0].start, len(whole.ids)
    assert whole.windows == (range(start, stop),) and whole.ids[-1] == tokenizer.eos_token_id
    for width in (1, 3, 7, 100):
        for overlap in range(min(width, 3)):
            answer = answer_of(tokenizer, REQUEST, True, width, overlap)
            assert answer.ids == whole.ids and all(len(one) <= width for one in answer.windows)
            assert {position for one in answer.windows for position in one} == set(range(start, stop))
            for before, after in zip(answer.windows, answer.windows[1:], strict=False):
                assert after.start == before.start + width - overlap and after.stop > before.stop


def test_a_window_must_advance():
    with pytest.raises(EditingError, match="windows would not advance"):
        load_editor("any_edit", {"window": 4, "overlap": 4}).config_class(window=4, overlap=4)
