"""Every run of released code that there is was packed into `tests/golden`, whose parity tests go over all of them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_json, golden_names
from golden_models import drawn_normal, golden_weights, unpack_golden_model
from paths import GOLDEN, TESTS, UNPACKED_GOLDEN
from safetensors.torch import load_file

METHODS = ("bird", "defer", "emmet", "melo", "pmet", "simie", "ultraedit")
# Method -> runs on tiny-gpt2 and on tiny-llama.
NUM_PACKED = {
    "alphaedit": (6, 6),
    "any_edit": (3, 8),
    "bird": (12, 12),
    "causal-trace": (4, 0),
    "crisp_edit": (2, 3),
    "defer": (4, 4),
    "emmet": (8, 8),
    "evk-align": (2, 1),
    "fe": (2, 2),
    "ft-l": (6, 6),
    "ft-m": (3, 4),
    "grace": (8, 8),
    "ike": (2, 0),
    "kn": (7, 7),
    "loc_ft": (4, 4),
    "lora": (6, 8),
    "melo": (3, 3),
    "memit": (7, 7),
    "memoir": (0, 6),
    "mend": (7, 7),
    "mend-import": (4, 4),
    "nas": (4, 4),
    "ote-se": (1, 1),
    "p-rome": (6, 6),
    "pmet": (8, 8),
    "prune": (2, 2),
    "r-rome": (6, 6),
    "rect": (6, 6),
    "rome": (6, 6),
    "serac": (5, 0),
    "serac-import": (1, 1),
    "simie": (3, 5),
    "stream-equals-batch": (2, 2),
    "ultraedit": (4, 4),
    "unke": (0, 3),
    "wise": (4, 5),
}
SHARED = {"null_dims", "network", "pool"}  # entries that are no runs
NUM_PACKED_GEMMA = {"memit": 1, "rome": 3}
needs_unpacked = pytest.mark.skipif(not UNPACKED_GOLDEN.is_dir(), reason=f"no unpacked runs in {UNPACKED_GOLDEN}")


def test_no_packed_run_is_lost():
    """Parity tests go over the runs that there are, so fewer of them would pass unnoticed."""
    wanted = {
        (method, model): count
        for method, counts in NUM_PACKED.items()
        for model, count in zip(GOLDEN_MODELS, counts, strict=True)
        if count
    }
    wanted |= {(method, "gemma3-270m"): count for method, count in NUM_PACKED_GEMMA.items()}
    wanted["scr", "selection"] = 3  # of no model: prompts as filled, and replies
    packed = {
        (path.parent.name, path.stem): len(golden_json(f"{path.parent.name}/{path.stem}").keys() - SHARED)
        for path in GOLDEN.glob("*/*.json")
    }
    assert packed == wanted


@needs_unpacked
@pytest.mark.parametrize("method", METHODS)
def test_every_run_is_packed(method):
    runs = {path.stem for path in (UNPACKED_GOLDEN / method).glob("*.json")}
    assert runs and runs == {f"{model}-{name}" for model, name in golden_names(method)}


@pytest.mark.parametrize("method", METHODS)
def test_the_parity_test_of_a_method_goes_over_all_packed_runs(method):
    text = (TESTS / f"parity/test_parity_{method}.py").read_text(encoding="utf-8")
    assert f'@pytest.mark.parametrize(("model_name", "name"), golden_names("{method}"))\ndef test_' in text


@needs_unpacked
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_models_are_the_original_ones_bit_by_bit(model_name, tmp_path):
    ours = load_file(unpack_golden_model(model_name, tmp_path) / "model.safetensors")
    original = load_file(UNPACKED_GOLDEN / "models" / model_name / "model.safetensors")
    assert ours.keys() == original.keys()
    for name, weight in original.items():
        assert torch.equal(ours[name].view(torch.int32), weight.view(torch.int32)), name


def test_weights_of_another_draw_are_refused(tmp_path):
    folder = tmp_path / "tiny-gpt2"
    shutil.copytree(GOLDEN / "models/tiny-gpt2", folder)
    recipe = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    (folder / "weights.json").write_text(json.dumps({**recipe, "seed": recipe["seed"] + 1}), encoding="utf-8")
    with pytest.raises(AssertionError, match="not the original ones"):
        golden_weights(folder)


def test_the_draw_is_that_of_torch_up_to_the_last_bits():
    uniform = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    normal = torch.empty(4096).normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn_normal(uniform, 0.2), normal, rtol=1e-5, atol=1e-8)
