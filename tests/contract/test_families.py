"""Every family against its row in the table of the documents: what the self-check finds, and an edit that needs it.

A third of the families runs by default, another one every day; `-m slow` runs the others, and
`LM_EDIT_FAMILIES=all`, or 0, 1 or 2, chooses.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import pytest
import torch
import yaml
from paths import ROOT
from transformers import PreTrainedModel

from edit_hooks import Delta, EditingError, EditRequest, PerRowAdapters, edited, load_editor
from edit_hooks.contract.family_configs import FAMILY_CONFIGS
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, REQUESTS, build_model, build_tokenizer, natural_tokenizer
from edit_hooks.modeling.architectures import architecture_of, attention_output, row_chosen
from edit_hooks.modeling.fingerprint.identity import computation_identity
from edit_hooks.modeling.support import record_support
from edit_hooks.self_check.run import self_check, summary

TABLE = yaml.safe_load((ROOT / "docs" / "_data" / "families.yaml").read_text(encoding="utf-8"))
NUM_TURNS = 3
CHOSEN = os.environ.get("LM_EDIT_FAMILIES") or str(datetime.date.today().toordinal() % NUM_TURNS)
FAMILIES = [
    pytest.param(name, marks=() if CHOSEN in ("all", str(number % NUM_TURNS)) else pytest.mark.slow)
    for number, name in enumerate(sorted([*FAMILY_CONFIGS, *ALL_MODEL_TYPES]))
]
REQUEST = EditRequest(**REQUESTS[0])
LORA = {"num_steps": 2, "modules": ["query_value"]}
ROME = {"num_steps": 2, "lr": 0.1, "context_templates": ["{}"], "second_moments": None}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_supports_what_the_table_says(model_type: str) -> None:
    model, tokenizer, row = build_model(model_type), build_tokenizer(natural_tokenizer(model_type)), TABLE[model_type]
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    support = self_check(model)
    assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())
    assert summary(model, support) == row
    record_support(model, support)
    if not support.weights:
        with pytest.raises(EditingError, match=r"no decoder blocks|self-check"):
            load_editor("rome", ROME).edit(model, tokenizer, [REQUEST])
        return
    editor = load_editor("lora", LORA) if "rewrite" in support.unusable else load_editor("rome", ROME)
    (delta,) = editor.edit(model, tokenizer, [REQUEST], measure=False)
    assert delta.meta["config"]["engine"] == ("fast" if support.fast else "reference")
    assert_acts_as_its_matrix(model, tokenizer(REQUEST.text, return_tensors="pt")["input_ids"], delta)
    assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())


@torch.no_grad()
def assert_acts_as_its_matrix(model: PreTrainedModel, ids_1T: torch.Tensor, delta: Delta) -> None:
    """Beside the weights and in them, an edit gives the logits of the model whose weights were added to by hand."""

    def logits() -> Any:
        return model(input_ids=ids_1T, use_cache=False).logits

    plain = logits()
    with edited(model, delta):
        written = logits()
    with PerRowAdapters(model, [delta]):
        beside = logits()
    maps = {name: model.get_submodule(name).weight for name in delta.factors}
    kept = {name: weight.clone() for name, weight in maps.items()}
    for name, (left, right, is_transposed) in delta.factors.items():
        maps[name] += right @ left.T if is_transposed else left @ right.T
    expected = logits()
    for name, weight in kept.items():
        maps[name].copy_(weight)
    assert (expected - plain).abs().max() > 1e-4
    for found in (written, beside):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_the_attention_is_edited_in_place_of_experts(model_type: str) -> None:
    """Experts in tensors of all have no linear map; a row names another one, and the model has another identity."""
    model, tokenizer = build_model(model_type), build_tokenizer(natural_tokenizer(model_type))
    with pytest.raises(EditingError, match=r"mixture of experts.*family=attention_output"):
        architecture_of(model).rewrite_name(1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    identity = computation_identity(model)
    with row_chosen(model, attention_output):
        assert computation_identity(model) != identity
        support = self_check(model)
        assert support.fast and support.scale is None
        record_support(model, support)
        edits = [
            load_editor("rome", {**ROME, "engine": engine}).edit(model, tokenizer, [REQUEST], measure=False)[0]
            for engine in ("fast", "reference")
        ]
        (name,) = edits[0].factors
        assert name == "model.layers.1.self_attn.o_proj"
        fast, plain = (edit.weights()[f"{name}.weight"] for edit in edits)
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
        assert_acts_as_its_matrix(model, tokenizer(REQUEST.text, return_tensors="pt")["input_ids"], edits[0])
        for editor, settings in {"pmet": {"num_steps": 1}, "kn": {}}.items():
            with pytest.raises(EditingError, match=r"is left alone where the attention's output map is the edited one"):
                load_editor(editor, settings).edit(model, tokenizer, [REQUEST])
    assert computation_identity(model) == identity
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_the_table_has_every_family() -> None:
    assert set(TABLE) == {*FAMILY_CONFIGS, *ALL_MODEL_TYPES}
    assert all(TABLE[name]["offer"] == "fast engine" and "failed" not in TABLE[name] for name in ALL_MODEL_TYPES)


@pytest.mark.parametrize("model_type", ["llama", "granite", "minicpm3", "hyperclovax"])
def test_memit_spreads_residuals_by_the_scale_of_the_contributions(model_type: str) -> None:
    """Written in full into one block, the residual is gone; Granite's blocks add 0.22 of their MLP's output."""
    settings = {**ROME, "num_steps": 4, "layers": [1], "moment_weight": 1e-6}
    model, tokenizer = build_model(model_type), build_tokenizer(natural_tokenizer(model_type))
    (delta,) = load_editor("memit", settings).edit(model, tokenizer, [REQUEST], measure=False)
    assert delta.diagnostics["distance_left"] < 0.02


def test_memit_is_refused_where_the_residual_stream_is_no_sum() -> None:
    """OpenAI GPT normalizes the sum, Gemma 4 scales it by the token."""
    for model_type in ("openai-gpt", "gemma4_text"):
        model, tokenizer = build_model(model_type), build_tokenizer(natural_tokenizer(model_type))
        with pytest.raises(EditingError, match=r"self-check 'residual'.*constant scale.*rome"):
            load_editor("memit", {**ROME, "layers": [1]}).edit(model, tokenizer, [REQUEST])
