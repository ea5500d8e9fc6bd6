"""R-ROME (keys averaged over prefixes in both places) and its prompt-key form against Rebuilding-ROME's numbers."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import check_rome_cases, golden_requests, relative_error, rome_config

from edit_hooks import load_editor

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("variant", ["cov", "nocov"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_r_rome_gives_the_numbers_of_the_release(model_name, variant, engine, dtype, golden_model):
    check_rome_cases("r-rome", "r_rome", model_name, golden_model(model_name, DTYPES[dtype]), variant, engine)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["cov", "nocov"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_prompt_keys_give_the_numbers_of_the_release(model_name, variant, dtype, golden_model):
    """The optimization is the one above, on either engine; which of its keys are used is decided after it."""
    loaded = golden_model(model_name, DTYPES[dtype])
    check_rome_cases("p-rome", "rome", model_name, loaded, variant, "fast", key_mode="prompt")


@pytest.mark.parametrize(("editor", "key_mode"), [("rome", "prefixed"), ("r_rome", "mixed")])
def test_the_two_names_differ_in_the_key_mode_only(editor, key_mode, golden_model):
    """`rome` with prefixed keys is `r_rome`, and the other way round: one implementation."""
    model, tokenizer = golden_model("tiny-llama")
    case, _ = golden_case("rome", "tiny-llama", "nocov-edit2")
    config = rome_config(case, None)
    other = "r_rome" if editor == "rome" else "rome"
    (ours,) = load_editor(editor, config={**config, "key_mode": key_mode}).edit(model, tokenizer, golden_requests()[2:])
    (same,) = load_editor(other, config=config).edit(model, tokenizer, golden_requests()[2:])
    (name,) = ours.weights()
    assert torch.equal(ours.weights()[name], same.weights()[name])
    (plain,) = load_editor(editor, config=config).edit(model, tokenizer, golden_requests()[2:])
    assert relative_error(ours.weights()[name], plain.weights()[name]) > 1e-2
