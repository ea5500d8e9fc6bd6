"""What the parity tests of editors of long answers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_data import golden_case
from parity import relative_error, token_nll
from parity_layers import contract

from edit_hooks import Delta, EditRequest, edited, load_editor
from edit_hooks.modeling.tokens import split_continuation

# States, losses, updates; 50 steps of AdamW enlarge rounding.
WIDE_BOUNDS, BOUNDS = (1e-8, 1e-8), (1e-4, 1e-4, 5e-4)


def answer_settings(case: dict[str, Any]) -> dict[str, Any]:
    """Our configuration for the settings of one golden case; its answers have no end-of-text token."""
    given = case["hparams"]
    names = {
        "layers": "layers",
        "num_steps": "v_num_grad_steps",
        "lr": "v_lr",
        "weight_decay": "v_weight_decay",
        "clamp_factor": "clamp_norm_factor",
        "window": "window_size",
        "overlap": "overlap",
    }
    settings = {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    return {**settings, "append_eos": False, "keep_intermediates": True}


def fit_settings(case: dict[str, Any]) -> dict[str, Any]:
    """Those of the training of blocks."""
    given = case["hparams"]
    fit = {"fit_lr": given["lr"], "fit_steps": given["optim_num_step"]}
    return {**fit, "preserved_texts": case["preserved_sentences"]}


def check_answers(editor: str, loaded: Any, name: str, *, wide: float = 1e-8, **settings: Any) -> Delta:
    """Edit the requests of a golden case jointly; compare states, losses, updates and what the answers become.

    Args:
        loaded: name of the golden model, the model and its tokenizer. wide: bound on updates in float64.
    """
    model_name, model, tokenizer = loaded
    case, tensors = golden_case(editor, model_name, name)
    state_bound, loss_bound, update_bound = (*WIDE_BOUNDS, wide) if model.dtype == torch.float64 else BOUNDS
    requests = [EditRequest(prompt=one["question"], target_new=one["answer"]) for one in case["requests"]]
    made = load_editor(editor, {**answer_settings(case), **settings})
    (delta,) = made.edit(model, tokenizer, requests, joint=True, measure=False)
    for number in range(len(requests)):
        error = relative_error(delta.intermediates[f"z.{number}"], tensors[f"z.{number}"])
        assert error < state_bound, f"{name}: z of request {number} off by {error:.1e}"
    if "layer_losses" in case:
        losses = [loss for fit in delta.diagnostics["fits"] for loss in fit["losses"]]
        assert losses == pytest.approx(case["layer_losses"], abs=loss_bound)
    assert delta.weights().keys() == case["norms"].keys()
    for parameter, update in delta.weights().items():
        theirs = f"delta.{parameter}"
        if theirs in tensors:
            pairs = [(update, tensors[theirs])]
        else:
            sides = zip(("out", "in"), contract(update), strict=True)
            pairs = [(ours, tensors[f"{theirs}.{side}"]) for side, ours in sides]
        for ours, reference in pairs:
            error = relative_error(ours, reference)
            assert error < update_bound, f"{name}: {parameter} off by {error:.1e}"
        assert float(update.double().norm()) == pytest.approx(case["norms"][parameter], rel=update_bound)
    with edited(model, delta):
        for request, (_, after) in zip(requests, case["nll"], strict=True):
            nll = token_nll(model, *split_continuation(tokenizer, request.text, request.continuation)).mean()
            assert float(nll) == pytest.approx(after, abs=1e-3)
    return delta
