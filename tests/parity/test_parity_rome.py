"""ROME against the numbers of the ROME release, and the tokenization both must agree on first."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case, golden_covariance, golden_json
from parity import check_rome_cases, golden_requests, rome_config, token_nll

from edit_hooks import edited, load_editor
from edit_hooks.locate.values.rows import kl_row, rewriting_row
from edit_hooks.modeling.tokens import split_continuation

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("variant", ["cov", "nocov"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_rome_gives_the_numbers_of_the_release(model_name, variant, engine, dtype, golden_model):
    check_rome_cases("rome", "rome", model_name, golden_model(model_name, DTYPES[dtype]), variant, engine)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_an_edit_from_the_texts_behind_the_covariance_gives_the_numbers_of_the_release(
    model_name, golden_model, tmp_path, monkeypatch
):
    """Second moments are collected by the editor, as in a user's run, instead of given."""
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    texts = golden_json("common")["sentences"]
    loaded = golden_model(model_name)
    check_rome_cases("rome", "rome", model_name, loaded, "cov", "fast", second_moments=texts)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_rows_have_the_positions_and_targets_of_the_release(model_name, number, golden_model):
    """Subject's last token in every row (the KL row is the last), prompt ids and target ids."""
    case, _ = golden_case("rome", model_name, f"cov-edit{number}")
    _, tokenizer = golden_model(model_name)
    request = golden_requests()[number]
    rows = [rewriting_row(tokenizer, request, text) for text in golden_json("common")["context_templates_flat"]]
    assert [*(row.position for row in rows), kl_row(tokenizer, request).position] == case["lookup_indices"]
    before = case["target_nll_before"]
    ids = split_continuation(tokenizer, request.text, " " + request.target_new)
    assert ids == (before["prompt_ids"], before["target_ids"])
    assert [token for _, token in rows[0].labels] == before["target_ids"]
    assert list(rows[0].ids) == [*before["prompt_ids"], *before["target_ids"][:-1]]


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_answers_change_as_in_the_release(model_name, golden_model):
    """Token-wise NLL of the target before and after, on the model with the weight really patched."""
    model, tokenizer = golden_model(model_name)
    case, _ = golden_case("rome", model_name, "cov-edit0")
    before, after = case["target_nll_before"], case["target_nll_after"]
    config = rome_config(case, golden_covariance(model_name, 1))
    (delta,) = load_editor("rome", config=config).edit(model, tokenizer, golden_requests()[:1])
    nll = token_nll(model, before["prompt_ids"], before["target_ids"])
    torch.testing.assert_close(nll.double(), torch.tensor(before["nll_per_token"]).double(), atol=1e-4, rtol=0)
    with edited(model, delta):
        nll = token_nll(model, after["prompt_ids"], after["target_ids"])
    # The update itself may be off by 5e-4 (float32 inverse); the slope of the NLL carries that into the third digit.
    torch.testing.assert_close(nll.double(), torch.tensor(after["nll_per_token"]).double(), atol=2e-3, rtol=0)
