"""SimIE against its release: streams of three, on the initial weights (float64) and on the running ones."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from golden_data import golden_case, golden_covariance, golden_json, golden_names
from golden_models import as_stored
from parity import golden_requests, relative_error, rome_config

from edit_hooks import Delta, EditRequest, edited, load_editor

# Float32 runs of the release differ from each other by up to 9e-5.
BOUNDS = {"float32": 5e-4, "float64": 1e-8}


def base_settings(case: dict[str, Any], model_name: str) -> tuple[str, dict[str, Any]]:
    """The base editor of a case, and our settings for it."""
    settings, layer = case["hparams"], case["layer"]
    if case["base"].startswith("rome"):
        covariance = golden_covariance(model_name, layer)
        return "rome", {**rome_config(case, covariance), "inverse_dtype": case["dtype"], "keep_intermediates": False}

    names = ("num_steps", "lr", "norm_constraint")
    return "ft_m", {"layers": [layer], **{name: settings[name] for name in names}}


def write_stream(
    case: dict[str, Any], model_name: str, golden_model, **settings: Any
) -> tuple[torch.Tensor, list[Delta]]:
    """The sum of a stream's updates [d, f], each step on the model with the earlier ones, and the steps."""
    model, tokenizer = golden_model(model_name, getattr(torch, case["dtype"]))
    base, own = base_settings(case, model_name)
    config = {"base": base, "base_settings": own, "layers": own["layers"], "ridge": case["simie"]["lamHyper"]}
    config["base_weights"] = "initial" if case["simie"]["init_model"] else "running"
    editor = load_editor("simie", config={**config, **settings})
    history: list[Delta] = []
    with contextlib.ExitStack() as applied:
        for record in case["requests"]:
            history += editor.edit(model, tokenizer, [EditRequest(**record)], history=history)
            applied.enter_context(edited(model, history[-1]))
    total = sum(delta.weights()[case["edited_weight"]].double() for delta in history)
    return as_stored(model_name, total)


@pytest.mark.parametrize(("model_name", "name"), golden_names("simie"))
def test_simie_gives_the_stream_of_the_release(model_name, name, golden_model):
    case, tensors = golden_case("simie", model_name, name)
    total = write_stream(case, model_name, golden_model)
    out, along = (torch.cos(torch.arange(length, dtype=torch.float64)) for length in reversed(total.shape))
    bound = BOUNDS[case["dtype"]]
    assert relative_error(total @ out, tensors["out"]) < bound
    assert relative_error(along @ total, tensors["in"]) < bound
    assert float(total.norm()) == pytest.approx(case["norms"]["step2.total_delta"], rel=max(bound, 1e-7))


def test_the_two_forms_differ(golden_model):
    case, _ = golden_case("simie", "tiny-llama", "rome-cov-running-lam1-seq012")
    running = write_stream(case, "tiny-llama", golden_model)
    initial = write_stream(case, "tiny-llama", golden_model, base_weights="initial")
    assert relative_error(initial, running) > 1e-2


def test_a_joint_step_is_written_request_by_request(golden_model):
    model, tokenizer = golden_model("tiny-llama", torch.float64)
    requests = golden_requests()
    base = {"context_templates": golden_json("common")["context_templates_flat"], "num_steps": 3}
    config = {"base": "memit", "base_settings": base, "ridge": 10.0, "layers": [1]}
    editor = load_editor("simie", config=config)
    (joint,) = editor.edit(model, tokenizer, requests, joint=True)
    history: list[Delta] = []
    with contextlib.ExitStack() as applied:
        for request in requests:
            history += editor.edit(model, tokenizer, [request], history=history)
            applied.enter_context(edited(model, history[-1]))
    (name,) = joint.weights()
    assert relative_error(joint.weights()[name], sum(step.weights()[name] for step in history)) < 1e-6
    editor = load_editor("simie", config={**config, "joint_steps": "together"})
    (together,) = editor.edit(model, tokenizer, requests, joint=True)
    assert relative_error(together.weights()[name], joint.weights()[name]) > 1e-2
