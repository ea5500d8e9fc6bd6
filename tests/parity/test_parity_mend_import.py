"""MEND against its release with networks that were imported from files with the release's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_json, golden_names, golden_tensors
from golden_models import as_stored
from parity import golden_requests, relative_error, token_nll
from parity_layers import contract
from safetensors.torch import save_file

from edit_hooks import edited, load_editor
from edit_hooks.training.importing import import_artifact

# In float32; a contracted update cancels in part, which leaves up to 1.5e-5.
UPDATE_BOUND, NLL_BOUND = 1e-4, 1e-4


@pytest.fixture(scope="module", params=GOLDEN_MODELS)
def imported(request, golden_model, tmp_path_factory) -> tuple[str, str]:
    """Name of a golden model, and the artifact of its imported network."""
    model_name, folder = request.param, tmp_path_factory.mktemp("mend")
    case = golden_json(f"mend-import/{model_name}")["edit0"]
    return model_name, str(import_network(model_name, golden_model(model_name), case, folder))


def import_network(model_name: str, loaded: Any, case: dict[str, Any], folder: Path) -> Path:
    tensors = golden_tensors(f"mend-import/{model_name}")
    network = {name.removeprefix("network."): t for name, t in tensors.items() if name.startswith("network.")}
    save_file(network, folder / "released.safetensors")
    settings = {"layers": case["layers"], "modules": case["modules"], "sign": "plus"}
    return import_artifact("mend", *loaded, folder / "released.safetensors", folder / "artifact", settings)


@pytest.mark.parametrize("name", ["edit0", "edit1", "batch012", "identity-edit0"])
def test_edits_are_those_of_the_release(name, imported, golden_model):
    """Single edits, a joint one, and the untrained network without normalization: a plain gradient step."""
    model_name, artifact = imported
    case, tensors = golden_case("mend-import", model_name, name)
    model, tokenizer = golden_model(model_name)
    settings: dict[str, Any] = {"artifact": artifact}
    if not case["normalize"]:
        settings = {"artifact": "identity", "sign": "plus", "edit_lr": case["edit_lrs"][0]}
        settings |= {key: case[key] for key in ("layers", "modules")}
    requests = [golden_requests()[number] for number in case["edits"]]
    (delta,) = load_editor("mend", settings).edit(model, tokenizer, requests, joint=len(requests) > 1)
    weights = delta.weights()
    assert sorted(weights) == sorted(case["inner_params"])
    for weight, update in weights.items():
        update_DF = as_stored(model_name, update)
        assert float(update_DF.double().norm()) == pytest.approx(case["norms"][weight], rel=UPDATE_BOUND)
        for side, ours in zip(("out", "in"), contract(update_DF), strict=True):
            assert relative_error(ours, tensors[f"{weight}.{side}"]) < UPDATE_BOUND, f"{weight} {side}"
    with edited(model, delta):
        for request, wanted in zip(requests, case["after"], strict=True):
            prompt = tokenizer(request.text)["input_ids"]
            target = tokenizer(f" {request.target_new}")["input_ids"]
            assert token_nll(model, prompt, target).tolist() == pytest.approx(wanted, abs=NLL_BOUND)


def test_every_packed_edit_is_compared():
    assert {name for _, name in golden_names("mend-import")} == {"edit0", "edit1", "batch012", "identity-edit0"}
    assert torch.is_tensor(golden_tensors("mend-import/tiny-gpt2")["network.edit_lrs"])
