"""EVK-Align against a plain loop of its formula (no code is released), on ROME in float64: losses and offsets."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_covariance, golden_names
from parity import check_losses, golden_requests, relative_error, rome_config

from edit_hooks import load_editor

BOUND = 1e-8  # float64; the loop and ROME's release agree to 1e-15 where lambda is 0


@pytest.mark.parametrize(("engine", "noise"), [("fast", "given"), ("fast", "drawn"), ("reference", "given")])
@pytest.mark.parametrize(("model_name", "name"), golden_names("evk-align"))
def test_offsets_are_those_of_the_formula(model_name, name, engine, noise, golden_model):
    """With the published lambda and sigma for GPT-2 XL, and with strong terms over three instances and other k."""
    case, tensors = golden_case("evk-align", model_name, name)
    model, tokenizer = golden_model(model_name, torch.float64)
    request = golden_requests()[case["edit"]]
    evk, covariance = case["evk"], golden_covariance(model_name, case["layer"])
    source = {"evk_noise": {request.text: tensors["noise"]}}
    if noise == "drawn":
        source = {"evk_sigma": evk["sigma"], "seed": evk["seed"]}
    config = {
        **rome_config(case, covariance),
        "context_templates": case["context_templates"],
        "engine": engine,
        "inverse_dtype": "float64",
        "evk_align": True,
        "evk_weight": evk["lambda"],
        "evk_instances": evk["instances"],
        "evk_top_k": evk["top_k"],
        "evk_stage": evk["stage"],
        **source,
    }
    (delta,) = load_editor("rome", config).edit(model, tokenizer, [request])
    assert relative_error(delta.intermediates["v_delta"], tensors["v_delta"]) < BOUND
    losses = {part: [record[part] for record in case["losses"]] for part in case["losses"][0]}
    check_losses(delta.diagnostics["losses"], losses, BOUND, f"{model_name} {name}")
    assert case["moved_by_the_term"] > 1e6 * BOUND
