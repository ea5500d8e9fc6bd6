"""What the parity tests of the multi-layer editors share."""

from __future__ import annotations

from typing import Any

import torch
from golden_data import golden_covariance, golden_json
from parity import check_losses, relative_error

from edit_hooks import Delta

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
