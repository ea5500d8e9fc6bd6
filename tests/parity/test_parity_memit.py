"""MEMIT against the numbers of the MEMIT release: single edits, a joint batch and a sequence; float32 and float64."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_names
from golden_models import as_stored
from parity import golden_requests, relative_error, token_nll
from parity_layers import check_intermediates, check_single_losses, contract, memit_config, step_tensors

from edit_hooks import EditRequest, edited, load_editor
from edit_hooks.deltas.apply import AppliedDeltas

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("variant", ["cov", "eye"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_independent_edits_give_the_numbers_of_the_release(model_name, variant, engine, dtype, golden_model):
    """All three requests in one call, each compared with the release's run of that request alone."""
    model, tokenizer = golden_model(model_name, DTYPES[dtype])
    wide = dtype == "float64"
    case, _ = golden_case("memit", model_name, f"{variant}-edit0")
    config = {**memit_config(case, model_name, variant), "engine": engine}
    deltas = load_editor("memit", config=config).edit(model, tokenizer, golden_requests())
    numbers = [0] if wide or variant == "eye" else [0, 1, 2]  # edits 1 and 2 are kept as float32 runs with covariance
    for number in numbers:
        where = f"{model_name} {variant} edit {number}, {engine}, {dtype}"
        case, tensors = golden_case("memit", model_name, f"{variant}-edit{number}")
        check_intermediates(deltas[number], tensors, wide, where)
        assert list(deltas[number].weights()) == case["edited_weights"]
        if number == 0:
            check_single_losses(deltas[0], case, wide, where)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["cov", "eye"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_a_joint_batch_gives_the_numbers_of_the_release(model_name, variant, dtype, golden_model):
    model, tokenizer = golden_model(model_name, DTYPES[dtype])
    case, tensors = golden_case("memit", model_name, f"{variant}-batch012")
    editor = load_editor("memit", config=memit_config(case, model_name, variant))
    (delta,) = editor.edit(model, tokenizer, golden_requests(), joint=True)
    check_intermediates(delta, tensors, dtype == "float64", f"{model_name} {variant} batch, {dtype}")
    for index, (layer, norm) in enumerate(case["steps"][0]["delta_fro"].items()):
        update = delta.weights()[case["edited_weights"][index]]
        expected = tensors[f"resid.layer{layer}"] @ tensors[f"adj_k.layer{layer}"].T
        expected = as_stored(model_name, expected)
        assert relative_error(update, expected) < 5e-5
        assert float(update.norm()) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_a_sequence_gives_the_numbers_of_the_release(model_name, golden_model):
    """Requests 0 and 1 together, then request 2 on the edited model; the release remembers nothing in between."""
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("memit", model_name, "cov-seq01-2")
    editor = load_editor("memit", config=memit_config(case, model_name, "cov"))
    (first,) = editor.edit(model, tokenizer, golden_requests()[:2], joint=True)
    check_intermediates(first, step_tensors(tensors, 0), False, f"{model_name} step 0")
    with edited(model, first):
        for joint in (True, False):
            (second,) = editor.edit(model, tokenizer, golden_requests()[2:], joint=joint, history=[first])
            check_intermediates(second, step_tensors(tensors, 1), False, f"{model_name} step 1, joint={joint}")
        after = case["steps"][1]["target_nll_after"][0]
        with edited(model, second):
            nll = token_nll(model, after["prompt_ids"], after["target_ids"])
    assert nll.tolist() == pytest.approx(after["nll_per_token"], abs=2e-3)


@pytest.mark.parametrize(("model_name", "name"), golden_names("ote-se"))
def test_a_stream_with_carried_keys_is_that_of_the_aligned_release(model_name, name, golden_model):
    """MEMIT with carried keys of OTE-SE's release, one layer; the release rounds each update to float32."""
    model, tokenizer = golden_model(model_name, torch.float64)
    case, tensors = golden_case("ote-se", model_name, name)
    editor = load_editor("memit", {**memit_config(case, model_name, "cov"), "carry_keys": True})
    (layer,) = case["layers"]
    history = []
    with AppliedDeltas(model) as applied:
        for number, step in enumerate(case["steps"]):
            requests = [EditRequest(**record) for record in step["requests"]]
            (delta,) = editor.edit(model, tokenizer, requests, joint=True, history=history, measure=False)
            own = step_tensors(tensors, number)
            assert relative_error(delta.intermediates["z"], own["z"]) < (5e-6 if number else 1e-8)
            assert relative_error(delta.stream_state[f"keys.layer{layer}"].T, own[f"keys_after.layer{layer}"]) < 5e-6
            (update,) = delta.weights().values()
            update_DF = as_stored(model_name, update)
            for side, ours in zip(("out", "in"), contract(update_DF), strict=True):
                error = relative_error(ours, own[f"update.layer{layer}.{side}"])
                assert error < 5e-6, f"{model_name} step {number}: update off by {error:.1e}"
            history.append(delta)
            applied.add(delta)
