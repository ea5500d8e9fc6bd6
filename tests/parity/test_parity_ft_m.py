"""FT-M (cross-entropy on the target's tokens) against EasyEdit's numbers."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import golden_requests, relative_error, token_nll

from edit_hooks import edited, load_editor


def _config(case):
    settings = case["hparams"]
    return {
        "layers": [case["layer"]],
        "num_steps": settings["num_steps"],
        "lr": settings["lr"],
        "batch_size": settings["batch_size"],
    }


def assert_numbers(delta, case, tensors, model):
    where = f"requests {case['requests']}"
    weights = delta.weights()
    for name, reference in tensors.items():
        error = relative_error(weights[name.removeprefix("delta.")], reference)
        assert error < 1e-4, f"{where}: {name} off by {error:.1e}"
    norm = sum(float(w.double().norm() ** 2) for w in weights.values() if w.dim() == 2) ** 0.5
    assert norm == pytest.approx(case["weight_norm"], rel=1e-4), where
    losses = [record["loss"] for record in delta.diagnostics["losses"]]
    assert losses == pytest.approx(case["losses"], abs=1e-4), where
    with edited(model, delta):
        for after in case["target_nll_after"]:
            nll = token_nll(model, after["prompt_ids"], after["target_ids"])
            assert nll.tolist() == pytest.approx(after["nll_per_token"], abs=1e-3), where


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_single_edits_give_the_numbers_of_the_release(model_name, number, golden_model):
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("ft-m", model_name, f"edit{number}")
    (delta,) = load_editor("ft_m", config=_config(case)).edit(model, tokenizer, [golden_requests()[number]])
    assert_numbers(delta, case, tensors, model)


def test_independent_edits_in_one_call_are_the_single_edits(golden_model):
    model, tokenizer = golden_model("tiny-llama")
    cases = [golden_case("ft-m", "tiny-llama", f"edit{number}") for number in range(3)]
    deltas = load_editor("ft_m", config=_config(cases[0][0])).edit(model, tokenizer, golden_requests())
    assert len(deltas) == 3
    for delta, (case, tensors) in zip(deltas, cases, strict=True):
        assert_numbers(delta, case, tensors, model)


def test_a_joint_batch_gives_the_numbers_of_the_release(golden_model):
    """Prompts of different lengths trained together; the mean is over sequences, not over tokens."""
    model, tokenizer = golden_model("tiny-llama")
    case, tensors = golden_case("ft-m", "tiny-llama", "batch012")
    deltas = load_editor("ft_m", config=_config(case)).edit(model, tokenizer, golden_requests(), joint=True)
    assert len(deltas) == 1
    assert_numbers(deltas[0], case, tensors, model)


def test_a_joint_batch_on_absolute_positions_starts_from_the_single_losses(golden_model):
    """GPT-2's first batch loss is the mean of the single ones. EasyEdit's is not: it pads left and shifts positions."""
    model, tokenizer = golden_model("tiny-gpt2")
    case, _ = golden_case("ft-m", "tiny-gpt2", "edit0")
    (delta,) = load_editor("ft_m", config=_config(case)).edit(model, tokenizer, golden_requests(), joint=True)
    singles = [golden_case("ft-m", "tiny-gpt2", f"edit{number}")[0]["losses"][0] for number in range(3)]
    assert delta.diagnostics["losses"][0]["loss"] == pytest.approx(sum(singles) / 3, abs=1e-4)
    with torch.no_grad():
        assert delta.diagnostics["losses"][-1]["loss"] < 0.7 * delta.diagnostics["losses"][0]["loss"]
