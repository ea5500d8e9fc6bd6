"""PMET against its release: an edit, a batch, two steps, and targets that become the most likely tokens."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_json, golden_names
from parity_layers import check_stream, memit_config

from edit_hooks import load_editor

# The release adds its updates to the weights in float32, so in float64 what lies behind the first one carries that.
BOUNDS = {"float32": {"update": 1e-4, "z_delta": 1e-4}, "float64": {"update": 5e-6, "z_delta": 1e-8}}


@pytest.mark.parametrize(("model_name", "name"), golden_names("pmet"))
def test_pmet_gives_the_updates_of_the_release(model_name, name, golden_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    case, _ = golden_case("pmet", model_name, name)
    loaded = (model_name, *golden_model(model_name, getattr(torch, case["dtype"])))
    in_layers = set(case["layers"]) <= {0, 1}  # whose covariance is kept; the others are collected from its sentences
    settings = memit_config(case, model_name, "cov" if in_layers else "texts")
    if not in_layers:
        settings |= {"second_moments": golden_json("common")["sentences"], "moment_tokens": None}
    editor = load_editor("pmet", config=settings)
    bounds = BOUNDS[case["dtype"]] if in_layers else {**BOUNDS[case["dtype"]], "update": 1e-4}  # C is a float32 sum
    check_stream(editor, "pmet", name, loaded, bounds)
