"""AnyEdit against the numbers of its release: states of all windows, the loss of every step, updates."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_covariance, golden_names
from parity import relative_error
from parity_answers import answer_settings, check_answers, fit_settings

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.tiny_models import build_tokenizer
from edit_hooks.locate import text_states
from edit_hooks.locate.answer_windows import answer_of
from edit_hooks.locate.streams import carried_keys
from edit_hooks.locate.streams.key_factor import KeyFactor

# In float64 the release still solves in float32, and its projector is stored in float32.
WIDE = {"memit": 1e-6, "alphaedit": 1e-5}
REQUEST = EditRequest(prompt="Who plays the trumpet?\n", target_new="Toko Yasuda plays it with a quartet in Vienna.")


def settings_of(case, model_name, **given):
    """Those of the base in a golden case; the release stops later where it solves than where it trains."""
    base, hparams = case.get("base", "unke"), case["hparams"]
    if base == "unke":
        return {"base_settings": fit_settings(case), **given}
    moments = {layer: golden_covariance(model_name, layer) for layer in hparams["layers"]}
    names = {"moment_weight": "mom2_update_weight", "l2": "L2", "nullspace_threshold": "nullspace_threshold"}
    solve = {ours: hparams[theirs] for ours, theirs in names.items() if theirs in hparams}
    given |= {"wide": WIDE[base], "early_stop_loss": 1e-2}
    return {"base": base, "base_settings": {"second_moments": moments, **solve}, **given}


@pytest.mark.parametrize(("model_name", "name"), golden_names("any_edit"))
def test_edits_give_the_numbers_of_the_release(model_name, name, golden_model):
    """A single edit, a batch of two and windows that overlap, on all three bases."""
    model, tokenizer = golden_model(model_name, torch.float64 if name.endswith("float64") else torch.float32)
    case, _ = golden_case("any_edit", model_name, name)
    delta = check_answers("any_edit", (model_name, model, tokenizer), name, **settings_of(case, model_name))
    assert delta.diagnostics["num_windows"] == sum(map(len, case["positions"]))
    given = case["hparams"]
    for request, positions in zip(case["requests"], case["positions"], strict=True):
        request = EditRequest(prompt=request["question"], target_new=request["answer"])
        answer = answer_of(tokenizer, request, False, given["window_size"], given["overlap"])
        assert answer.positions == positions


@pytest.mark.parametrize("name", ["edit0-float64", "memit-edit0-float64"])
def test_the_plain_loop_gives_the_same_states(name, golden_model):
    """Offsets of earlier windows are held in the prefix of the fast passes."""
    loaded = ("tiny-llama", *golden_model("tiny-llama", torch.float64))
    case, _ = golden_case("any_edit", "tiny-llama", name)
    check_answers("any_edit", loaded, name, **settings_of(case, "tiny-llama", engine="reference"))


def test_one_window_has_the_state_of_unke(golden_model):
    model, tokenizer = golden_model("tiny-llama", torch.float64)
    case, _ = golden_case("any_edit", "tiny-llama", "edit0-float64")
    one = case["requests"][0]
    request = EditRequest(prompt=one["question"], target_new=one["answer"])
    settings = {**answer_settings(case), "early_stop_loss": 0.0}
    fit = {**fit_settings(case), "fit_steps": 1, "preserved_texts": ["One text."]}
    whole_settings = {**settings, "window": 100, "base_settings": fit}
    (whole,) = load_editor("any_edit", whole_settings).edit(model, tokenizer, [request], measure=False)
    del settings["window"], settings["overlap"]
    (plain,) = load_editor("unke", {**settings, **fit}).edit(model, tokenizer, [request], measure=False)
    torch.testing.assert_close(whole.intermediates["z.0"], plain.intermediates["z.0"], rtol=0, atol=0)


@pytest.mark.parametrize("base", ["memit", "alphaedit"])
def test_many_other_keys_are_protected_by_the_same_system(base, golden_model, monkeypatch):
    """Beyond half of the key width they are in a factor; with it and without it the update is the same.

    So it is of texts that are read one by one, and keys that are added a few at a time.
    """
    model, tokenizer = golden_model("tiny-llama", torch.float64)
    case, _ = golden_case("any_edit", "tiny-llama", f"{base}-edit0-float64")
    one = case["requests"][0]
    requests = [EditRequest(prompt=one["question"], target_new=one["answer"] + more) for more in ("", " It is " * 20)]
    settings = {**answer_settings(case), **settings_of(case, "tiny-llama"), "num_steps": 2, "window": 40}
    del settings["wide"]
    (factored,) = load_editor("any_edit", settings).edit(model, tokenizer, requests, joint=True, measure=False)
    assert factored.diagnostics["layers"][0]["protected_keys"] > 128 // 2
    passes = []
    with monkeypatch.context() as patch:
        read = text_states._read_part
        patch.setattr(text_states, "_read_part", lambda *args: passes.append(read(*args)) or passes[-1])
        patch.setattr(text_states, "MAX_TOKENS", 1)
        patch.setattr(carried_keys, "KEYS_AT_ONCE", 5)
        (in_parts,) = load_editor("any_edit", settings).edit(model, tokenizer, requests, joint=True, measure=False)
    assert {len(one.keys_RTF) for one in passes} == {1} and len(passes) == 2 * (len(settings["layers"]) + 1)
    monkeypatch.setattr(KeyFactor, "start", lambda metric, ridge, width: None)
    (whole,) = load_editor("any_edit", settings).edit(model, tokenizer, requests, joint=True, measure=False)
    for name, update in whole.weights().items():
        for other in (factored, in_parts):
            assert relative_error(other.weights()[name], update) < 1e-9


def test_the_update_is_least_squares_with_the_other_tokens_at_zero(golden_model):
    """Delta K = R and Delta K_p = 0 as far as the ridge allows, by a solve of the whole system."""
    model, tokenizer = golden_model("tiny-gpt2", torch.float64)
    request = EditRequest(prompt="Who made it?", target_new="Nintendo in Kyoto made it.")
    settings = {"base": "memit", "layers": [1], "num_steps": 3, "window": 4, "append_eos": False}
    base_settings = {"second_moments": None, "moment_weight": 0.5, "residual_mode": "faithful"}
    editor = load_editor("any_edit", {**settings, "base_settings": base_settings, "keep_intermediates": True})
    (delta,) = editor.edit(model, tokenizer, [request], measure=False)
    answer = answer_of(tokenizer, request, False, 4, 0)
    seen = {}
    block = model.transformer.h[1]
    handles = [
        block.mlp.c_proj.register_forward_pre_hook(lambda _, args: seen.__setitem__("keys", args[0][0])),
        block.register_forward_hook(
            lambda _, args, out: seen.__setitem__("hidden", (out if torch.is_tensor(out) else out[0])[0])
        ),
    ]
    with torch.no_grad():
        model(torch.tensor([answer.ids]))
    for handle in handles:
        handle.remove()
    keys, rows = seen["keys"], answer.positions
    residual = delta.intermediates["z.0"] - seen["hidden"][rows]
    system = keys.T @ keys + 0.5 * torch.eye(keys.shape[1], dtype=torch.float64)
    expected = torch.linalg.solve(system, keys[rows].T) @ residual
    (update,) = delta.weights().values()
    assert relative_error(update, expected) < 1e-9
    assert delta.diagnostics["layers"][0]["protected_keys"] == len(answer.ids) - len(rows)


def test_only_some_editors_write_states():
    assert [name for name in EDITORS if editor_class(name).writes_states] == ["memit", "alphaedit", "unke"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": "ft_m"}, "bases that do: memit, alphaedit, unke"),
        ({"base": "nas"}, "writes no states"),
        ({"base": "rect"}, "itself has another editor as its base"),
        ({"base": "alphaedit", "base_settings": {"carry_keys": True}}, "carry_keys: True"),
        ({"base": "memit", "base_settings": {"stream": "exact"}}, "stream: 'exact'"),
        ({"base": "alphaedit", "base_settings": {"deflation": 0.1}}, "deflation"),
    ],
)
def test_bases_and_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(EditingError, match=message):
        load_editor("any_edit", settings)


def test_recorded_settings_can_be_given_again(golden_model):
    model, tokenizer = golden_model("tiny-llama")
    request = EditRequest(prompt="Who made it?", target_new="Nintendo in Kyoto")
    settings = {"base": "memit", "layers": [0, 1], "num_steps": 3, "lr": 0.3, "base_settings": {"second_moments": None}}
    (first,) = load_editor("any_edit", settings).edit(model, tokenizer, [request], measure=False)
    recorded = first.meta["config"]
    assert recorded["base_settings"]["num_steps"] == 3 and recorded["base_settings"]["lr"] == 0.3
    assert recorded["base_settings"]["context_templates"] == ["{}"]
    (again,) = load_editor("any_edit", recorded).edit(model, tokenizer, [request], measure=False)
    assert again.meta["config"] == recorded
    for name, update in first.weights().items():
        torch.testing.assert_close(again.weights()[name], update, rtol=0, atol=0)


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
