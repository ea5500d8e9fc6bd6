"""What the parity tests share: running an editor on a golden case and measuring the distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from golden_data import golden_case, golden_covariance, golden_json
from golden_models import as_stored
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks import EditRequest, load_editor

# Bounds of tests/golden/README.md, by tensor: (without covariance, with covariance). The release inverts C in float32.
FLOAT32_BOUNDS = {
    "k_star": (5e-5, 5e-5),
    "cur_input": (5e-5, 5e-5),
    "cur_output": (5e-5, 5e-5),
    "v_delta": (1e-4, 1e-4),
    "v_star": (1e-4, 1e-4),
    "u": (1e-5, 5e-4),
    "v": (1e-4, 1e-4),
}
FLOAT64_BOUND = 1e-8
UPDATE_BOUNDS = (1e-4, 5e-4)


def golden_requests() -> list[EditRequest]:
    """The three requests of `golden/common.json`."""
    return [
        EditRequest(
            prompt=record["prompt"],
            subject=record["subject"],
            target_new=record["target_new"]["str"],
            target_true=record["target_true"]["str"],
            case_id=str(record["case_id"]),
        )
        for record in golden_json("common")["requests"]
    ]


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64."""
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    difference = ours.detach().double().cpu() - reference.double()
    return float(difference.norm() / reference.double().norm())


def rome_config(case: dict[str, Any], covariance: torch.Tensor | None) -> dict[str, Any]:
    """Our configuration for the settings of one golden case."""
    settings, layer = case["hparams"], case["layer"]
    return {
        "layers": [layer],
        "num_steps": settings["v_num_grad_steps"],
        "lr": settings["v_lr"],
        "weight_decay": settings["v_weight_decay"],
        "clamp_factor": settings["clamp_norm_factor"],
        "kl_factor": settings["kl_factor"],
        "fact_token": settings["fact_token"],
        "early_stop_loss": 0.05,
        "context_templates": golden_json("common")["context_templates_flat"],
        "second_moments": None if covariance is None else {layer: covariance},
        "keep_intermediates": True,
    }


def check_rome_cases(
    method: str,
    editor_name: str,
    model_name: str,
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    variant: str,
    engine: str,
    **config: Any,
) -> None:
    """Edit all three requests in one call and compare every intermediate value with the method's own code."""
    model, tokenizer = loaded
    wide = model.dtype == torch.float64
    cases = [golden_case(method, model_name, f"{variant}-edit{number}") for number in range(3)]
    covariance = golden_covariance(model_name, 1) if variant == "cov" else None
    settings = {
        **rome_config(cases[0][0], covariance),
        "engine": engine,
        "inverse_dtype": "float64" if wide else "float32",
        **config,
    }
    deltas = load_editor(editor_name, config=settings).edit(model, tokenizer, golden_requests())
    for number, (delta, (case, tensors)) in enumerate(zip(deltas, cases, strict=True)):
        where = f"{method} {model_name} {variant} edit {number}, {engine}, {model.dtype}"
        column = int(variant == "cov")
        for name, bounds in FLOAT32_BOUNDS.items():
            error = relative_error(delta.intermediates[name], tensors[name])
            assert error < (FLOAT64_BOUND if wide else bounds[column]), f"{where}: {name} off by {error:.1e}"
        update = torch.outer(tensors["v"], tensors["u"])
        update = as_stored(model_name, update)
        weights = delta.weights()
        assert list(weights) == [case["edited_weight"]]
        error = relative_error(weights[case["edited_weight"]], update)
        assert error < (FLOAT64_BOUND if wide else UPDATE_BOUNDS[column]), f"{where}: update off by {error:.1e}"
        check_losses(delta.diagnostics["losses"], case["losses"], 1e-8 if wide else 1e-4, where)
        assert delta.diagnostics["clamped"] == case["clamp_bound_active_at_end"], where


def check_losses(ours: list[dict[str, float]], reference: dict[str, list[float]], bound: float, where: str) -> None:
    """One record per evaluation, and every part of every record within an absolute bound."""
    assert len(ours) == len(reference["loss"]), f"{where}: {len(ours)} evaluations, expected {len(reference['loss'])}"
    for part, values in reference.items():
        worst = max(abs(record[part] - value) for record, value in zip(ours, values, strict=True))
        assert worst < bound, f"{where}: {part} off by {worst:.1e}"


@torch.no_grad()
def token_nll(model: PreTrainedModel, prompt_ids: Sequence[int], target_ids: Sequence[int]) -> torch.Tensor:
    """Negative log-probability of each target token after the prompt, one plain forward of one row."""
    ids = torch.tensor([[*prompt_ids, *target_ids]], device=model.device)
    log_p = model(ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    return -log_p[torch.arange(len(target_ids)), torch.tensor(target_ids)].cpu()
