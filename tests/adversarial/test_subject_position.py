"""Edits at the subject's last token take: the map's output there is the target value, and the target is likelier.

The token is found here by encoding the text up to the end of the subject, not by the code under test. An edit that
reads and writes at another token is consistent with itself and fails only such a comparison. The golden models' large
weights carry a change at the subject to the answer; on the contract's tiny models it hardly arrives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from editor_settings import PMET_CONFIG, ROME_CONFIG
from golden_data import GOLDEN_MODELS, golden_covariance
from hook_edits import nll
from parity import golden_requests
from tiny_architectures import ARCHITECTURES

from edit_hooks import Delta, EditRequest, edited, load_editor

LAYER = 0
EDITS = golden_requests()  # text follows the subjects, which have several tokens


def strong(model_name: str) -> dict[str, Any]:
    """Settings under which an edit moves the target as far as it can; the prompt's own key is the one written."""
    steps = {"num_steps": 25, "lr": 0.5, "weight_decay": 0.0, "kl_factor": 0.0, "clamp_factor": 1e3}
    moments = {"second_moments": {LAYER: golden_covariance(model_name, LAYER)}, "keep_intermediates": True}
    return {**steps, **moments, "layers": [LAYER], "context_templates": ["{}"], "fact_token": "subject_last"}


@torch.no_grad()
def outputs_of_map(model: Any, tokenizer: Any, request: EditRequest, delta: Delta) -> tuple[torch.Tensor, int]:
    """Outputs [T, d] of the edited map over the prompt under an edit, and the column of the subject's last token."""
    text, subject = request.text, request.subject
    assert subject is not None
    end = len(tokenizer(text[: text.index(subject) + len(subject)]).input_ids)
    ids = tokenizer(text).input_ids
    assert 1 < end < len(ids)
    kept: list[torch.Tensor] = []
    name = ARCHITECTURES[model.config.model_type].rewrite_name(LAYER)
    with edited(model, delta):
        handle = model.get_submodule(name).register_forward_hook(lambda _m, _a, output: kept.append(output[0]))
        model(torch.tensor([ids]))
        handle.remove()
    return kept[0], end - 1


def check_that_it_takes(model: Any, tokenizer: Any, request: EditRequest, delta: Delta, value_D: torch.Tensor) -> None:
    """The value is reached at the subject's last token and nowhere else, and the target gains 0.7 nats per token."""
    outputs_TD, column = outputs_of_map(model, tokenizer, request, delta)
    distance_T = (outputs_TD - value_D).norm(dim=1) / value_D.norm()
    assert distance_T[column] < 1e-3
    assert distance_T[torch.arange(len(distance_T)) != column].min() > 0.1
    before, after = (nll(model, tokenizer, request, each) for each in (None, delta))
    assert after < before - 0.7, (before, after)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_pmet_writes_its_target_value_at_the_subject(model_name, golden_model):
    model, tokenizer = golden_model(model_name, torch.float64)
    editor = load_editor("pmet", {**PMET_CONFIG, **strong(model_name), "moment_weight": 1e-3})
    for request, delta in zip(EDITS, editor.edit(model, tokenizer, EDITS), strict=True):
        check_that_it_takes(model, tokenizer, request, delta, delta.intermediates["z"][0])


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_simie_writes_the_target_value_of_its_base_at_the_subject(model_name, golden_model):
    model, tokenizer = golden_model(model_name, torch.float64)
    base = {**ROME_CONFIG, **strong(model_name), "inverse_dtype": "float64"}
    ideals = load_editor("rome", base).edit(model, tokenizer, EDITS)
    deltas = load_editor("simie", {"base": "rome", "base_settings": base, "ridge": 1e-6}).edit(model, tokenizer, EDITS)
    for request, delta, ideal in zip(EDITS, deltas, ideals, strict=True):
        check_that_it_takes(model, tokenizer, request, delta, ideal.intermediates["v_star"])
