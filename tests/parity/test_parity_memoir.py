"""MEMOIR against the numbers of its release: features, masks, the memory after every edit, overlaps, the early stop."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_names
from parity import relative_error, token_nll
from parity_layers import contract

from edit_hooks import Delta, EditRequest, edited, load_editor
from edit_hooks.memory.column_memory import ColumnMemory, overlaps
from edit_hooks.modeling.tokens import split_continuation

# Memory, losses; in float64 and float32. The release pads on the left, which shifts positions, and rotary angles are in
# float32 in both: 1.5e-6.
BOUNDS = {True: (1e-5, 1e-5), False: (1e-4, 1e-4)}


def settings_for(case, tensors):
    given = case["hparams"]
    return {
        "layers": [2],
        "num_steps": given["n_iter"],
        "lr": given["edit_lr"],
        "top_k": given["top_k"],
        "threshold": given["irr_threshold"],
        "feature": given["prompt_feature_agg"],
        "context_templates": case["context_templates"],
        "given": {"permutation": tensors["permutation"].double(), "background": tensors["background_mean"]},
    }


def memory_of(delta):
    """M as a matrix of all columns, and the masks as zeros and ones."""
    memory = ColumnMemory.of(delta.hook_edit)
    width = len(delta.hook_edit.tensors["permutation"])
    masks = torch.zeros(len(memory.masks_NP), width, dtype=torch.uint8).scatter_(1, memory.masks_NP, 1)
    return memory.at(torch.arange(width)), masks


@pytest.mark.parametrize(("model_name", "name"), golden_names("memoir"))
def test_edits_give_the_numbers_of_the_release(model_name, name, golden_model):
    wide = name.endswith("float64")
    model, tokenizer = golden_model(model_name, torch.float64 if wide else torch.float32)
    case, tensors = golden_case("memoir", model_name, name)
    bound, loss_bound = BOUNDS[wide]
    editor = load_editor("memoir", settings_for(case, tensors))
    steps: list[Delta] = []
    for number, step in enumerate(case["steps"]):
        steps += editor.edit(model, tokenizer, [EditRequest(**step["request"])], history=steps, measure=False)
        memory_DF, masks = memory_of(Delta.summed(steps))
        assert torch.equal(masks, tensors[f"step{number}.masks"])
        for side, ours in zip(("out", "in"), contract(memory_DF), strict=True):
            error = relative_error(ours, tensors[f"step{number}.memory.{side}"])
            assert error < bound, f"{name} step {number}: memory off by {error:.1e}"
        diagnostics = steps[-1].diagnostics
        losses = [record["loss"] for record in diagnostics["losses"]][: diagnostics["steps"]]
        assert losses == pytest.approx(step["losses"], abs=loss_bound)  # of the release, those that a step followed
    check_answers(model, tokenizer, case, tensors, Delta.summed(steps))


def check_answers(model, tokenizer, case, tensors, total):
    """Eight prompts: overlap with every mask, the one that is used, and the answer's likelihood."""
    memory = ColumnMemory.of(total.hook_edit)
    width = len(tensors["permutation"])
    settings = {**settings_for(case, tensors), "num_steps": 1, "keep_intermediates": True}
    asking = [EditRequest(prompt=case["facts"][one["fact"]][0], target_new="x") for one in case["evaluation"]]
    masks = [
        delta.intermediates["mask"]
        for delta in load_editor("memoir", settings).edit(model, tokenizer, asking, measure=False)
    ]
    for asked, mask_P in zip(case["evaluation"], masks, strict=True):
        prompt, target = case["facts"][asked["fact"]]
        assert overlaps(mask_P[None], memory.masks_NP, width)[0].tolist() == pytest.approx(asked["overlap"])
        context, target_ids = split_continuation(tokenizer, prompt, f" {target}")
        with edited(model, total, prompt_lengths=[len(context)]):
            nll = token_nll(model, context, target_ids)
        assert float(nll.mean()) == pytest.approx(asked["nll"], abs=1e-3)


def test_features_are_those_of_the_release(golden_model):
    model, tokenizer = golden_model("tiny-llama", torch.float64)
    case, tensors = golden_case("memoir", "tiny-llama", "single-float64")
    editor = load_editor("memoir", {**settings_for(case, tensors), "num_steps": 1, "keep_intermediates": True})
    (delta,) = editor.edit(model, tokenizer, [EditRequest(**case["steps"][0]["request"])], measure=False)
    assert relative_error(delta.intermediates["feature"], tensors["step0.feature"]) < 1e-6  # rotary angles in float32
    assert delta.intermediates["mask"].tolist() == tensors["step0.masks"][0].nonzero()[:, 0].tolist()
