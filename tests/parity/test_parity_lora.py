"""LoRA and AdaLoRA against EasyEdit on peft, from the adapters that were drawn there: adapters and losses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from golden_data import golden_case, golden_names, golden_tensors
from parity import relative_error
from parity_layers import contract

from edit_hooks import Delta, EditRequest, edited, load_editor
from edit_hooks.modeling.architectures import architecture_of, map_shape

# Adam divides by small second moments; float64 runs of the release pass through a float32 loss. An alpha that is off by
# 5 % gives 0.06, an orthogonality penalty of 0.4 for 0.5 gives 0.42.
ADAPTER_BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-5}
LOSS_BOUND = 1e-5


def initial_adapters(case: dict[str, Any], model_name: str, model: Any) -> dict[str, torch.Tensor]:
    """The drawn adapters; LoRA's B and AdaLoRA's E are zero and not stored."""
    prefix = f"init.{case['init']}."
    stored = golden_tensors(f"lora/{model_name}")
    given = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    for name in architecture_of(model).all_module_names(case["modules"], case["layers"]):
        if case["kind"] == "adalora":
            given[f"E.{name}"] = torch.zeros(case["initial_rank"], 1)
        else:
            given[f"B.{name}"] = torch.zeros(map_shape(model.get_submodule(name))[0], case["hparams"]["rank"])
    return given


def config_of(case: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, Any]:
    settings = case["hparams"]
    return {
        "layers": case["layers"],
        "modules": case["modules"],
        "kind": case["kind"],
        "rank": settings["rank"],
        "alpha": settings["lora_alpha"],
        "dropout": settings["lora_dropout"],
        "num_steps": settings["num_steps"],
        "lr": settings["lr"],
        "weight_decay": settings["weight_decay"],
        "batch_size": settings["batch_size"],
        "initial_adapters": given,
    }


def check_step(delta: Delta, step: dict[str, Any], tensors: dict[str, torch.Tensor], number: int, bound: float) -> None:
    losses = [record["loss"] for record in delta.diagnostics["losses"]][:-1]  # there before each step only
    if len(losses) == len(step["nll"]):  # else one per chunk there, and their mean here
        assert losses == pytest.approx(step["nll"], abs=LOSS_BOUND)
    assert len(delta.stream_state) > 0
    for name, trained in delta.stream_state.items():
        _, part, module = name.split("/")
        for side, ours in zip(("out", "in"), contract(trained), strict=True):
            error = relative_error(ours, tensors[f"step{number}.{part}.{module}.{side}"])
            assert error < bound, f"{part} of {module} off by {error:.1e} in step {number}"


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize(("model_name", "name"), golden_names("lora"))
def test_lora_gives_the_adapters_of_the_release(model_name, name, engine, golden_model):
    """Edits, a stream that goes on with its adapter, and joint edits in chunks of two and three."""
    case, tensors = golden_case("lora", model_name, name)
    dtype = getattr(torch, case["dtype"])
    model, tokenizer = golden_model(model_name, dtype)
    config = {**config_of(case, initial_adapters(case, model_name, model)), "engine": engine}
    editor = load_editor("lora", config)
    history: list[Delta] = []
    with contextlib.ExitStack() as applied:
        for number, step in enumerate(case["steps"]):
            requests = [EditRequest(**record) for record in step["requests"]]
            history += editor.edit(model, tokenizer, requests, joint=len(requests) > 1, history=history)
            applied.enter_context(edited(model, history[-1]))
            check_step(history[-1], step, tensors, number, ADAPTER_BOUNDS[dtype])
