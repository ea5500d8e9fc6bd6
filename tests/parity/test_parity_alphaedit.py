"""AlphaEdit against the numbers of its release: our null space, the low-rank solve in float64, and the carried keys."""

from __future__ import annotations

import pytest
import torch
import yaml
from golden_data import GOLDEN_MODELS, golden_case, golden_covariance, golden_json
from parity import check_losses, golden_requests, relative_error, token_nll
from parity_layers import check_intermediates, check_single_losses, memit_config, step_tensors
from paths import ROOT

from edit_hooks import Delta, edited, load_editor

# The release takes P from a float32 SVD and solves in float32.
UPDATE_BOUND = 2e-4
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def editor_for(case, model_name, engine="fast"):
    settings = case["hparams"]
    config = memit_config(case, model_name, "cov")
    extra = {"nullspace_threshold": settings["nullspace_threshold"], "l2": settings["L2"], "engine": engine}
    return load_editor("alphaedit", config={**config, **extra})


def assert_numbers(
    delta: Delta, tensors: dict[str, torch.Tensor], model_name: str, where: str, wide: bool = False
) -> None:
    check_intermediates(delta, tensors, wide, where)
    for layer, update in enumerate(delta.weights().values()):
        after = relative_error(delta.stream_state[f"keys.layer{layer}"].T, tensors[f"keys_after.layer{layer}"])
        # In float64 the difference is that of the null spaces: the release's comes from a float32 SVD.
        assert after < (5e-6 if wide else 5e-5), f"{where}: carried keys of layer {layer} off by {after:.1e}"
        if not wide:
            stem = f"delta_weight.layer{layer}"
            error = relative_error(update, tensors[f"{stem}.left"] @ tensors[f"{stem}.right"].T)
            assert error < UPDATE_BOUND, f"{where}: update of layer {layer} off by {error:.1e}"


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_null_spaces_have_the_dimensions_of_the_release(model_name, golden_model):
    case, _ = golden_case("alphaedit", model_name, "cov-edit0")
    model, tokenizer = golden_model(model_name)
    (delta,) = editor_for(case, model_name).edit(model, tokenizer, golden_requests()[:1])
    shares = [facts["null_space_share"] for facts in delta.diagnostics["layers"]]
    width = len(golden_covariance(model_name, 0))
    assert shares == [dims / width for dims in golden_json(f"alphaedit/{model_name}")["null_dims"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_an_edit_gives_the_numbers_of_the_release(model_name, engine, dtype, golden_model):
    model, tokenizer = golden_model(model_name, DTYPES[dtype])
    wide = dtype == "float64"
    case, _ = golden_case("alphaedit", model_name, "cov-edit0")
    _, tensors = golden_case("alphaedit", model_name, "cov-edit0-float64" if wide else "cov-edit0")
    delta = editor_for(case, model_name, engine).edit(model, tokenizer, golden_requests())[0]
    assert_numbers(delta, tensors, model_name, f"{model_name} edit 0, {engine}, {dtype}", wide)
    if not wide:
        check_single_losses(delta, case, wide, model_name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_a_joint_batch_gives_the_numbers_of_the_release(model_name, dtype, golden_model):
    model, tokenizer = golden_model(model_name, DTYPES[dtype])
    wide = dtype == "float64"
    case, _ = golden_case("alphaedit", model_name, "cov-batch012")
    _, tensors = golden_case("alphaedit", model_name, "cov-batch012-float64" if wide else "cov-batch012")
    (delta,) = editor_for(case, model_name).edit(model, tokenizer, golden_requests(), joint=True)
    assert_numbers(delta, tensors, model_name, f"{model_name} batch, {dtype}", wide)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_later_rewrite_makes_an_update_after_every_evaluation(model_name, golden_model):
    """So one evaluation more gives its targets, as the settings of Qwen have it; its own count is off by 1 to 3 %."""
    model, tokenizer = golden_model(model_name, torch.float64)
    case, _ = golden_case("alphaedit", model_name, "rewrite-edit0-float64")
    counted = {**case["hparams"], "v_num_grad_steps": len(case["losses"]["loss"]) + 1}
    ours, off = (
        editor_for({"layers": [0, 1], "hparams": hparams}, model_name).edit(model, tokenizer, golden_requests()[:1])[0]
        for hparams in (counted, case["hparams"])
    )
    released = torch.tensor([case["z"]], dtype=torch.float64)
    assert ours.diagnostics["steps"] == case["num_updates"]
    assert relative_error(ours.intermediates["z"], released) < 1e-8
    assert relative_error(off.intermediates["z"], released) > 5e-3
    check_losses(ours.diagnostics["losses"][:-1], case["losses"], 1e-8, model_name)


@pytest.mark.parametrize("name", ["alphaedit/qwen2.5-7b", "alphaedit/qwen3-8b", "evk_edit/qwen2.5-7b"])
def test_settings_of_the_later_rewrite_make_its_25_updates(name):
    config = yaml.safe_load((ROOT / f"edit_hooks/configs/{name}.yaml").read_text(encoding="utf-8"))["config"]
    assert config["num_steps"] - 1 == 25


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_a_sequence_carries_the_keys_of_the_release(model_name, golden_model):
    """Step 1 runs on the edited model with the keys of step 0 in the system; without them the update differs."""
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("alphaedit", model_name, "cov-seq01-2")
    editor = editor_for(case, model_name)
    (first,) = editor.edit(model, tokenizer, golden_requests()[:2], joint=True)
    assert_numbers(first, step_tensors(tensors, 0), model_name, f"{model_name} step 0")
    with edited(model, first):
        (second,) = editor.edit(model, tokenizer, golden_requests()[2:], history=[first])
        (forgetful,) = editor.edit(model, tokenizer, golden_requests()[2:])
        assert_numbers(second, step_tensors(tensors, 1), model_name, f"{model_name} step 1")
        after = case["steps"][1]["target_nll_after"][0]
        with edited(model, second):
            nll = token_nll(model, after["prompt_ids"], after["target_ids"])
    assert nll.tolist() == pytest.approx(after["nll_per_token"], abs=2e-3)
    name = case["edited_weights"][0]
    assert relative_error(forgetful.weights()[name], second.weights()[name]) > 1e-2
