"""EMMET against its release: an edit, a batch, two steps, and two layers with the identity added to C."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_names
from parity_layers import check_stream, memit_config

from edit_hooks import load_editor

# The release adds its updates to the weights in float32, so in float64 what lies behind the first one carries that.
BOUNDS = {"float32": {"update": 1e-4, "z_delta": 1e-4}, "float64": {"update": 5e-6, "z_delta": 1e-8}}


def config_of(case, model_name):
    settings = case["hparams"]
    return {
        **memit_config(case, model_name, "cov"),
        "ridge": settings["emmet_lambda"],
        "identity_weight": settings["update_norm_lambda"],
        "ridge_single": False,  # EasyEdit has true
    }


@pytest.mark.parametrize(("model_name", "name"), golden_names("emmet"))
def test_emmet_gives_the_updates_of_the_release(model_name, name, golden_model):
    case, _ = golden_case("emmet", model_name, name)
    loaded = (model_name, *golden_model(model_name, getattr(torch, case["dtype"])))
    editor = load_editor("emmet", config=config_of(case, model_name))
    check_stream(editor, "emmet", name, loaded, BOUNDS[case["dtype"]])


def test_the_ridge_of_easyedit_gives_another_single_edit(golden_model):
    case, _ = golden_case("emmet", "tiny-llama", "cov-edit0-float64")
    loaded = ("tiny-llama", *golden_model("tiny-llama", torch.float64))
    editor = load_editor("emmet", config={**config_of(case, "tiny-llama"), "ridge_single": True})
    with pytest.raises(AssertionError, match="off by"):
        check_stream(editor, "emmet", "cov-edit0-float64", loaded, BOUNDS["float64"])
