"""BIRD against the BAKE release: losses with their bidirectional terms, the value offset and the update."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_covariance, golden_names
from parity import FLOAT32_BOUNDS, UPDATE_BOUNDS, check_losses, golden_requests, relative_error, rome_config

from edit_hooks import load_editor

# An implementation of the same formulas differs by 1e-12; another token span by more than 1e-3.
BOUND = 1e-8


def make_edit(model_name: str, name: str, golden_model, **settings):
    """The golden case with its tensors, and our edit of the same request under the same settings."""
    case, tensors = golden_case("bird", model_name, name)
    model, tokenizer = golden_model(model_name, getattr(torch, case["dtype"]))
    covariance = golden_covariance(model_name, case["layer"]) if case["hparams"]["mom2_adjustment"] else None
    config = {
        **rome_config(case, covariance),
        "inverse_dtype": case["dtype"],
        "alpha": case["hparams"]["aerfa"],
        "beta": case["hparams"]["beta"],
        "relation_phrases": {case["relation_id"]: case["relation_phrases"]},
        **settings,
    }
    request = dataclasses.replace(golden_requests()[case["request"]], relation_id=case["relation_id"])
    (delta,) = load_editor("bird", config=config).edit(model, tokenizer, [request])
    return case, tensors, delta


def check_numbers(model_name: str, name: str, golden_model, engine: str) -> None:
    case, tensors, delta = make_edit(model_name, name, golden_model, engine=engine)
    where, wide = f"{model_name} {name}, {engine}", case["dtype"] == "float64"
    column = int(case["hparams"]["mom2_adjustment"])
    check_losses(delta.diagnostics["losses"], case["losses"], BOUND if wide else 1e-4, where)
    for tensor in ("v_delta", "u", "v"):
        error = relative_error(delta.intermediates[tensor], tensors[tensor])
        assert error < (BOUND if wide else FLOAT32_BOUNDS[tensor][column]), f"{where}: {tensor} off by {error:.1e}"
    update = torch.outer(tensors["v"], tensors["u"])
    weight = delta.weights()[case["edited_weight"]]
    error = relative_error(weight, update.T if weight.shape != update.shape else update)
    assert error < (BOUND if wide else UPDATE_BOUNDS[column]), where
    assert delta.diagnostics["clamped"] == case["clamp_bound_active_at_end"], where


@pytest.mark.parametrize(("model_name", "name"), golden_names("bird"))
def test_bird_gives_the_numbers_of_the_release(model_name, name, golden_model):
    check_numbers(model_name, name, golden_model, "fast")


@pytest.mark.parametrize("name", ["nocov-edit0-float64", "cov-alpha0.02-beta1.2-edit1-float64"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_plain_engine_gives_the_same_numbers(model_name, name, golden_model):
    check_numbers(model_name, name, golden_model, "reference")


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_span_of_the_release_is_the_default_and_matters(model_name, golden_model):
    _, tensors, released = make_edit(model_name, "cov-alpha0.02-beta1.2-edit1-float64", golden_model)
    *_, covering = make_edit(model_name, "cov-alpha0.02-beta1.2-edit1-float64", golden_model, token_span="covering")
    assert relative_error(released.intermediates["v_delta"], tensors["v_delta"]) < BOUND
    assert relative_error(covering.intermediates["v_delta"], tensors["v_delta"]) > 1e-3
