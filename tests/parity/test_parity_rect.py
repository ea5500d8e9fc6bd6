"""RECT against its two public versions: on ROME (20 % kept) and on MEMIT (40 % kept, single edits, batch, sequence)."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_covariance
from golden_models import as_stored
from parity import golden_requests, relative_error, rome_config, token_nll
from parity_layers import memit_config, step_tensors

from edit_hooks import Delta, edited, load_editor
from edit_hooks.modeling.tensors import unpack_bits

# Rounding may swap entries next to the threshold; it cannot change how many are kept.
FLIPPED = 2e-4


def check_mask(update: torch.Tensor, packed: torch.Tensor, where: str) -> torch.Tensor:
    """The release's mask, after checking that ours keeps as many entries and differs in a few at most."""
    mask = unpack_bits(packed, update)
    assert int((update != 0).sum()) == int(mask.sum()), where
    flipped = int(((update != 0) ^ mask).sum())
    assert flipped <= FLIPPED * mask.numel(), f"{where}: {flipped} of {mask.numel()} entries flipped"
    return mask


def memit_rect(case, model_name):
    config = memit_config(case, model_name, "cov")
    return load_editor("rect", config={"base": "memit", "base_settings": config})


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_rect_on_rome_keeps_the_same_entries_as_the_release(model_name, golden_model):
    model, tokenizer = golden_model(model_name)
    rome, _ = golden_case("rome", model_name, "cov-edit0")
    base = {**rome_config(rome, golden_covariance(model_name, 1)), "inverse_dtype": "float32"}
    released = {"keep": 0.2, "guard": 0.0, "at_threshold": "zero"}
    editor = load_editor("rect", config={"base": "rome", "base_settings": base, **released})
    assert not editor.supports_joint  # as its base
    deltas = editor.edit(model, tokenizer, golden_requests())
    for number, delta in enumerate(deltas):
        where = f"{model_name} edit {number}"
        case, tensors = golden_case("rect", model_name, f"rome-edit{number}")
        update = delta.weights()[case["edited_weight"]]
        mask = check_mask(update, tensors["mask"], where)
        assert int((update != 0).sum()) == case["kept"]
        _, factors = golden_case("rome", model_name, f"cov-edit{number}")
        expected = torch.outer(factors["v"], factors["u"])
        expected = as_stored(model_name, expected)
        both = mask & (update != 0)
        assert relative_error(update[both], expected[both]) < 5e-4, where
        assert float(update.norm()) == pytest.approx(case["norm"], rel=1e-3)
        assert not delta.is_low_rank


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_rect_on_memit_keeps_the_same_entries_as_the_release(model_name, golden_model):
    model, tokenizer = golden_model(model_name)
    for name, joint in (("edit0", False), ("batch012", True)):
        memit, factors = golden_case("memit", model_name, f"cov-{name}")
        case, tensors = golden_case("rect", model_name, f"memit-{name}")
        delta = memit_rect(memit, model_name).edit(model, tokenizer, golden_requests(), joint=joint)[0]
        for layer, weight in enumerate(memit["edited_weights"]):
            where = f"{model_name} {name} layer {layer}"
            update = delta.weights()[weight]
            mask = check_mask(update, tensors[f"delta_weight.layer{layer}.mask"], where)
            expected = factors[f"resid.layer{layer}"] @ factors[f"adj_k.layer{layer}"].T
            expected = as_stored(model_name, expected)
            both = mask & (update != 0)
            assert relative_error(update[both], expected[both]) < 5e-5, where
            assert float(update.norm()) == pytest.approx(case["steps"][0]["delta_fro"][str(layer)], rel=1e-4)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_a_sequence_continues_from_the_sparse_update(model_name, golden_model):
    model, tokenizer = golden_model(model_name)
    memit, _ = golden_case("memit", model_name, "cov-seq01-2")
    case, tensors = golden_case("rect", model_name, "memit-seq01-2")
    editor = memit_rect(memit, model_name)
    (first,) = editor.edit(model, tokenizer, golden_requests()[:2], joint=True)
    with edited(model, first):
        (second,) = editor.edit(model, tokenizer, golden_requests()[2:], history=[first])
        after = case["steps"][1]["target_nll_after"][0]
        with edited(model, second):
            nll = token_nll(model, after["prompt_ids"], after["target_ids"])
    assert nll.tolist() == pytest.approx(after["nll_per_token"], abs=2e-3)
    golden = step_tensors(tensors, 1)
    assert relative_error(second.intermediates["z"], golden["z"]) < 1e-4
    for layer, weight in enumerate(memit["edited_weights"]):
        assert relative_error(second.intermediates[f"keys.layer{layer}"], golden[f"keys.layer{layer}"]) < 5e-5
        update = second.weights()[weight]
        mask = check_mask(update, golden[f"delta_weight.layer{layer}.mask"], f"{model_name} step 1 layer {layer}")
        assert float(update.norm()) == pytest.approx(case["steps"][1]["delta_fro"][str(layer)], rel=1e-4)
        kept = golden.get(f"delta_weight.layer{layer}.kept")
        if kept is not None:
            expected = torch.zeros_like(update)
            expected[mask] = kept
            both = mask & (update != 0)
            assert relative_error(update[both], expected[both]) < 5e-5


def test_a_sparse_delta_takes_one_bit_per_entry_and_survives_the_disk(golden_model, tmp_path):
    model, tokenizer = golden_model("tiny-llama")
    memit, _ = golden_case("memit", "tiny-llama", "cov-edit0")
    (delta,) = memit_rect(memit, "tiny-llama").edit(model, tokenizer, golden_requests()[:1])
    dense = sum(update.numel() * 4 for update in delta.weights().values())
    assert delta.num_bytes < dense / 10
    delta.save(tmp_path / "delta.safetensors")
    again = Delta.load(tmp_path / "delta.safetensors")
    for name, update in delta.weights().items():
        assert torch.equal(again.weights()[name], update)
    total = Delta.summed([delta, again])
    for name, update in delta.weights().items():
        assert torch.equal(total.weights()[name], 2 * update)
