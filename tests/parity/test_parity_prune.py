"""PRUNE against its release: after one ROME edit, and after three in sequence, in all five variants."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_covariance
from parity import golden_requests, relative_error, rome_config, token_nll

from edit_hooks import Delta, EditingError, edited, load_editor

VARIANTS = {
    "log": {},
    "log2": {"log_base": 2},
    "log1_5": {"log_base": 1.5},
    "log1_2": {"log_base": 1.2},
    "linear": {"function": "linear"},
}


def editor_for(model_name, **settings):
    case, _ = golden_case("rome", model_name, "cov-edit0")
    base = {**rome_config(case, golden_covariance(model_name, 1)), "inverse_dtype": "float32"}
    return load_editor("prune", config={"base": "rome", "base_settings": base, **settings})


def check(update: torch.Tensor, case, tensors, variant: str, where: str) -> None:
    """Singular values of the restrained sum, and the sum itself for the two variants that are kept."""
    values = torch.linalg.svdvals(update.double())
    expected = case["variants"][variant]["singular_values_out"]
    assert values[: len(expected)].tolist() == pytest.approx(expected, rel=1e-3), where
    assert float(values[len(expected) :].max()) < 1e-4 * expected[0]
    if f"delta_weight_{variant}.left" in tensors:
        stem = f"delta_weight_{variant}"
        reference = tensors[f"{stem}.left"] @ tensors[f"{stem}.right"].T
        assert relative_error(update, reference) < 1e-3, where


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_one_edit_gives_the_numbers_of_the_release(model_name, variant, golden_model):
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("prune", model_name, "edit1")
    (delta,) = editor_for(model_name, **VARIANTS[variant]).edit(model, tokenizer, golden_requests()[1:2])
    assert delta.is_low_rank
    check(delta.weights()[case["edited_weight"]], case, tensors, variant, f"{model_name} {variant}")
    facts = delta.diagnostics["prune"][case["edited_weight"]]
    assert facts["largest_original"] == pytest.approx(case["s_max_original"], rel=1e-5)
    assert facts["largest_before"] == pytest.approx(case["singular_values_in"][0], rel=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_a_stream_is_restrained_as_a_whole(model_name, variant, golden_model):
    """Step by step on restrained weights, yet the sum is what the release gets by restraining once at the end."""
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("prune", model_name, "seq012")
    editor = editor_for(model_name, **VARIANTS[variant])
    history: list[Delta] = []
    for request in golden_requests():
        with edited(model, *history):
            history += editor.edit(model, tokenizer, [request], history=history)
    total = Delta.summed(history).weights()[case["edited_weight"]]
    check(total, case, tensors, variant, f"{model_name} {variant}")
    with edited(model, *history):
        for answer in case["variants"][variant]["target_nll"]:
            nll = token_nll(model, answer["prompt_ids"], answer["target_ids"])
            assert nll.tolist() == pytest.approx(answer["nll_per_token"], abs=1e-2)


def test_safe_never_enlarges(golden_model):
    """With base 1.2 the release turns 4.96 into 5.29 on this model, whose largest original singular value is 3.75."""
    model, tokenizer = golden_model("tiny-llama")
    sums = []
    for safe in (False, True):
        editor = editor_for("tiny-llama", log_base=1.2, safe=safe)
        history: list[Delta] = []
        for request in golden_requests():
            with edited(model, *history):
                history += editor.edit(model, tokenizer, [request], history=history)
        facts = next(iter(history[-1].diagnostics["prune"].values()))
        assert (facts["num_enlarged"] > 0) != safe
        sums.append(torch.linalg.svdvals(next(iter(Delta.summed(history).weights().values())).double()))
    assert float(sums[0][1]) > 5.2
    assert float(sums[1][1]) == pytest.approx(4.96, abs=0.01)


def test_a_history_of_another_editor_is_refused(golden_model):
    model, tokenizer = golden_model("tiny-gpt2")
    with pytest.raises(EditingError, match="PRUNE"):
        editor_for("tiny-gpt2").edit(model, tokenizer, golden_requests()[:1], history=[Delta()])
