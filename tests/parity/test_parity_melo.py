"""MELO against its release: clusters, points, radii, adapters, losses, and the edits each prompt runs with."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from adapter_databases import adapters_of, clusters_of
from golden_data import golden_case, golden_names
from parity import relative_error

from edit_hooks import Delta, EditRequest, edited, load_editor
from edit_hooks.deltas.hook_edit import HookEdit

# Also in float64 the release's loss passes through float32. Queries do not depend on the loss.
FACTOR_BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-6}
QUERY_BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-8}
NO_ADAPTER = {-100: -1}  # the release's mark and ours


def config_of(case: dict[str, Any], draw: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Our settings for those of a golden case, with its drawn factors."""
    settings = case["hparams"]
    layers = sorted({int(part) for name in case["target_modules"] for part in name.split(".") if part.isdigit()})
    return {
        "layers": layers,
        "rank": settings["num_rank_per_block"],
        "scale": settings["num_block"],
        "radius": settings["init_radius"],
        "num_steps": settings["num_iter"],
        "lr": settings["edit_lr"],
        "halve_every": settings["step_lr"]["step_size"],
        "query_token": "last_text" if settings["key_id"] == -1 else "last_prompt",
        "append_eos": "released" if settings["appended_eos_text"] else False,
        "initial_factors": {name: draw[f"init_A.{name}"] for name in case["target_modules"]},
    }


def check_step(
    history: list[Delta], case: dict[str, Any], tensors: dict[str, torch.Tensor], number: int, dtype: torch.dtype
) -> None:
    """The database after one step, and the adapters that the step has trained."""
    step, scale = case["steps"][number], case["hparams"]["num_block"]
    delta, hook_edit = history[-1], HookEdit.combine(delta.hook_edit for delta in history)
    assert hook_edit is not None and hook_edit.settings["module"] == case["query_module"]
    assert hook_edit.settings["targets"] == case["target_modules"]
    clusters = clusters_of(hook_edit)
    released = [[NO_ADAPTER.get(block, block) for block in points] for points in step["points"]]
    assert [cluster.adapter_ids for cluster in clusters] == released
    centers = torch.stack([cluster.center_Q for cluster in clusters])
    assert relative_error(centers, tensors[f"step{number}.centres"]) < QUERY_BOUNDS[dtype]
    radii = torch.tensor([cluster.radius for cluster in clusters], dtype=torch.float64)
    assert relative_error(radii, tensors[f"step{number}.radii"]) < QUERY_BOUNDS[dtype]
    for name, adapter in zip(case["target_modules"], adapters_of(hook_edit)[number], strict=True):
        assert relative_error(adapter.up_KF.T, tensors[f"step{number}.A.{name}"]) < FACTOR_BOUNDS[dtype], name
        assert relative_error(adapter.down_DK.T / scale, tensors[f"step{number}.B.{name}"]) < FACTOR_BOUNDS[dtype], name
    losses = [record["loss"] for record in delta.diagnostics["losses"]]
    assert losses == pytest.approx(step["losses"], abs=1e-4 if dtype == torch.float32 else 2e-6)


@torch.no_grad()
def nll_under(model, delta: Delta, ids: list[int], prompt_length: int, *, whole: bool) -> list[float]:
    """Negative log-likelihood of each token behind the prompt, where the last token is fed as well if ``whole``."""
    lengths = None if whole else [prompt_length]
    with edited(model, delta, prompt_lengths=lengths):
        log_p = model(torch.tensor([ids])).logits[0, prompt_length - 1 : -1].log_softmax(-1)
    return (-log_p[torch.arange(len(ids) - prompt_length), torch.tensor(ids[prompt_length:])]).tolist()


@pytest.mark.parametrize(("model_name", "name"), golden_names("melo"))
def test_melo_gives_the_stream_of_the_release(model_name, name, golden_model):
    case, tensors = golden_case("melo", model_name, name)
    dtype = getattr(torch, case["dtype"])
    model, tokenizer = golden_model(model_name, dtype)
    # Both precisions start from the same float32 draw.
    draw = golden_case("melo", model_name, name.removesuffix("-float64"))[1]
    editor = load_editor("melo", config=config_of(case, draw))
    history: list[Delta] = []
    for number, record in enumerate(case["requests"]):
        with contextlib.ExitStack() as applied:
            if history:
                applied.enter_context(edited(model, Delta.summed(history)))
            history += editor.edit(model, tokenizer, [EditRequest(**record)], history=history)
        check_step(history, case, tensors, number, dtype)
        whole = Delta.summed(history)
        for ids, length, after in zip(
            case["input_ids"], case["prompt_lengths"], case["steps"][number]["nll_per_token_after"], strict=False
        ):
            ours = nll_under(model, whole, ids, length, whole=name.startswith("last-token-key"))
            assert ours == pytest.approx(after, abs=2e-4)
