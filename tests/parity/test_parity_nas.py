"""NAS against its release: rescaled targets, dropped edits, a stream, and the norms behind the anchor."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_names
from parity import relative_error
from parity_layers import memit_config, step_tensors

from edit_hooks import EditRequest, load_editor
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.editors.nas import trimmed_mean


def settings_for(case, model_name):
    given = case["hparams"]
    own = {"nullspace_threshold": given["nullspace_threshold"], "l2": given["L2"], "anchor": case["anchor"]}
    return {**memit_config(case, model_name, "cov"), **own}


@pytest.mark.parametrize(("model_name", "name"), golden_names("nas"))
def test_edits_give_the_numbers_of_the_release(model_name, name, golden_model):
    """The release solves in float32, as AlphaEdit does; its targets in float64 are exact."""
    wide = name.endswith("float64")
    model, tokenizer = golden_model(model_name, torch.float64 if wide else torch.float32)
    case, tensors = golden_case("nas", model_name, name)
    editor = load_editor("nas", settings_for(case, model_name))
    history = []
    with AppliedDeltas(model) as applied:
        for number, step in enumerate(case["steps"]):
            requests = [EditRequest(**record) for record in step["requests"]]
            (delta,) = editor.edit(model, tokenizer, requests, joint=True, history=history, measure=False)
            error = relative_error(delta.intermediates["z"], step_tensors(tensors, number)["z"])
            assert error < (1e-8 if wide else 1e-4), f"{model_name} {name} step {number}: z off by {error:.1e}"
            assert delta.diagnostics["value_norm"] == pytest.approx(
                sum(step["norms"]) / len(requests), rel=1e-8 if wide else 1e-4
            )
            assert delta.diagnostics["dropped"] == pytest.approx(sum(step["skipped"]) / len(requests))
            assert any("dropped" in text for text in delta.warnings) == any(step["skipped"])
            for norm, update in zip(step["delta_fro"].values(), delta.weights().values(), strict=True):
                assert float(update.norm()) == pytest.approx(norm, rel=2e-4)
            history = editor.condensed(model, [*history, delta])
            applied.add(delta)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_anchor_is_a_mean_of_norms_of_the_release(model_name, golden_model):
    """The release optimizes 16 facts with one Adam, so the last digits differ."""
    model, tokenizer = golden_model(model_name, torch.float64)
    case, _ = golden_case("nas", model_name, "edit0-float64")
    facts = [EditRequest(**record) for record in case["anchor_facts"]]
    anchor = load_editor("nas", settings_for(case, model_name)).measure_anchor(model, tokenizer, facts)
    assert anchor == pytest.approx(sum(case["anchor_norms"]) / len(facts), rel=1e-4)


def test_the_mean_leaves_the_longest_twentieth_out():
    assert trimmed_mean([1.0] * 38 + [100.0, 200.0]) == 1.0
    assert trimmed_mean([3.0, 5.0]) == 4.0


def test_without_an_anchor_it_is_that_of_the_first_step(golden_model):
    """A lone first edit is AlphaEdit's, and later ones have the norm of it."""
    model, tokenizer = golden_model("tiny-gpt2")
    case, _ = golden_case("nas", "tiny-gpt2", "seq01-2")
    settings = {**settings_for(case, "tiny-gpt2"), "num_steps": 5}
    first, second, third = (EditRequest(**record) for step in case["steps"] for record in step["requests"])
    editor = load_editor("nas", {**settings, "anchor": None})
    del settings["anchor"]
    (one,) = editor.edit(model, tokenizer, [first], measure=False)
    (plain,) = load_editor("alphaedit", settings).edit(model, tokenizer, [first], measure=False)
    assert relative_error(one.intermediates["z"], plain.intermediates["z"]) < 1e-6
    history = editor.condensed(model, [one])
    with AppliedDeltas(model) as applied:
        applied.add(one)
        (two,) = editor.edit(model, tokenizer, [second, third], joint=True, history=history, measure=False)
    assert two.diagnostics["anchor"] == one.diagnostics["value_norm"]
