"""LocFT-BF against the numbers of its release: single edits, shuffled batches, the gate, the stop, a whole block."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_names
from parity import relative_error
from parity_layers import contract

from edit_hooks import EditRequest, load_editor


@pytest.mark.parametrize(("model_name", "name"), golden_names("loc_ft"))
def test_edits_give_the_numbers_of_the_release(model_name, name, golden_model):
    """Float64. The release pads on the left: batches of GPT-2, whose positions shift, are of single rows.

    Rotary angles are in float32, so batches of Llama shift by 6e-7.
    """
    model, tokenizer = golden_model(model_name, torch.float64)
    case, tensors = golden_case("loc_ft", model_name, name)
    given = case["hparams"]
    requests = [EditRequest(**record) for record in case["requests"]]
    settings = {
        "layers": [given["layer"]],
        "num_steps": given["num_steps"],
        "lr": given["lr"],
        "batch_size": given["batch_size"],
        "trained": "rewrite" if given["rewrite_module"].endswith(".weight") else "block",
        "seed": case["seed"],
    }
    (delta,) = load_editor("loc_ft", settings).edit(model, tokenizer, requests, joint=True, measure=False)
    bound = 1e-5 if model_name == "tiny-llama" and len(requests) > 1 else 1e-8
    losses = [record["loss"] for record in delta.diagnostics["losses"]]
    assert losses == pytest.approx(case["losses"], abs=bound)
    assert set(delta.dense) == set(case["norms"])
    for parameter, update in delta.dense.items():
        assert float(update.norm()) == pytest.approx(case["norms"][parameter], rel=bound), parameter
        sides = dict(zip(("out", "in"), contract(update), strict=True)) if update.dim() == 2 else {"whole": update}
        for side, ours in sides.items():
            error = relative_error(ours, tensors[f"{parameter}.{side}"])
            assert error < bound, f"{model_name} {name}: {parameter} off by {error:.1e}"
    assert (losses[-1] < 0.01) == (name == "stop-edit0")
    skipped = len(requests) * len(losses) // given["batch_size"] - delta.diagnostics["steps"]
    assert (skipped > 0) == (name == "skip-batch2")
