"""What the parity tests of the multi-layer editors share."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from golden_data import golden_case, golden_covariance, golden_json
from golden_models import as_stored
from parity import check_losses, relative_error

from edit_hooks import Delta, EditRequest, edited
from edit_hooks.base.editor import Editor

# Bounds of tests/golden/README.md. The release adds its float64 update to the weights in float32, so in a float64 run
# everything behind the first layer carries that rounding.
FLOAT32_BOUNDS = {"z": 1e-4, "z_delta": 1e-4, "keys": 5e-5, "adj_k": 5e-5, "resid": 5e-5}
FIRST_LAYER_FLOAT64, LATER_LAYERS_FLOAT64 = 1e-8, 5e-6


def memit_config(case: dict[str, Any], model_name: str, variant: str) -> dict[str, Any]:
    """Our configuration for the settings of one golden case."""
    settings = case["hparams"]
    return {
        "layers": case["layers"],
        "num_steps": settings["v_num_grad_steps"],
        "lr": settings["v_lr"],
        "weight_decay": settings["v_weight_decay"],
        "clamp_factor": settings["clamp_norm_factor"],
        "kl_factor": settings["kl_factor"],
        "fact_token": settings["fact_token"],
        "moment_weight": settings["mom2_update_weight"],
        "early_stop_loss": 0.05,
        "residual_mode": "faithful",
        "context_templates": golden_json("common")["context_templates_flat"],
        "second_moments": {n: golden_covariance(model_name, n) for n in case["layers"]} if variant == "cov" else None,
        "keep_intermediates": True,
    }


def bound(name: str, wide: bool) -> float:
    """Largest relative difference of one tensor."""
    if not wide:
        return FLOAT32_BOUNDS[name.partition(".")[0]]
    return FIRST_LAYER_FLOAT64 if name.startswith("z") or name.endswith("layer0") else LATER_LAYERS_FLOAT64


def check_intermediates(delta: Delta, tensors: dict[str, torch.Tensor], wide: bool, where: str) -> None:
    """Targets, keys, right factors and residuals of one delta against a golden case."""
    compared = [name for name in tensors if name.partition(".")[0] in FLOAT32_BOUNDS]
    assert {"z", "keys.layer0", "keys.layer1"} <= set(compared)
    for name in compared:
        error = relative_error(delta.intermediates[name], tensors[name])
        assert error < bound(name, wide), f"{where}: {name} off by {error:.1e}"


def step_tensors(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """The tensors of one step of a sequence, without the step's prefix."""
    prefix = f"step{step}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_single_losses(delta: Delta, case: dict[str, Any], wide: bool, where: str) -> None:
    """The loss curve of the only request of a case."""
    (reference,) = case["steps"][0]["losses"]
    check_losses(delta.diagnostics["losses"], reference, 1e-8 if wide else 1e-4, where)


def contract(update_DF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An update contracted with cos(0), cos(1), ... from the input side [D] and from the output side [F]."""
    along_D, along_F = (torch.cos(torch.arange(width, dtype=torch.float64)) for width in update_DF.shape)
    return update_DF.double() @ along_F, along_D @ update_DF.double()


def check_stream(editor: Editor[Any], method: str, name: str, loaded: Any, bounds: Mapping[str, float]) -> None:
    """Edit the steps of a golden case one after the other; compare updates and offsets.

    Args:
        loaded: name of the golden model, the model and its tokenizer.
        bounds: by name of a tensor of the case, and for the ``update``.
    """
    model_name, model, tokenizer = loaded
    case, tensors = golden_case(method, model_name, name)
    history: list[Delta] = []
    with contextlib.ExitStack() as applied:
        for number, step in enumerate(case["steps"]):
            where = f"{method} {model_name} {name} step {number}"
            requests = [EditRequest(**record) for record in step["requests"]]
            (delta,) = editor.edit(model, tokenizer, requests, joint=True, history=history)
            own = step_tensors(tensors, number)
            assert sorted(delta.weights()) == sorted(case["edited_weights"]), where
            for weight, update in delta.weights().items():
                update_DF = as_stored(model_name, update)
                for side, ours in zip(("out", "in"), contract(update_DF), strict=True):
                    if f"{weight}.{side}" in own:
                        error = relative_error(ours, own[f"{weight}.{side}"])
                        assert error < bounds["update"], f"{where}: {weight} off by {error:.1e}"
                norm = float(update.double().norm())
                assert norm == pytest.approx(step["norms"][weight], rel=bounds["update"]), where
            for tensor in bounds.keys() & own.keys():
                error = relative_error(delta.intermediates[tensor], own[tensor])
                assert error < bounds[tensor], f"{where}: {tensor} off by {error:.1e}"
            history.append(delta)
            applied.enter_context(edited(model, delta))
