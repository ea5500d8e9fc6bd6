"""Edits as LoRA adapters and checkpoints, against edits in place."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from exported import TOLERANCE, build, harness_answers, save
from lm_eval.models.huggingface import HFLM
from random_deltas import codebook, random_delta
from safetensors.torch import load_file
from state import assert_same_state
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks import Delta, EditingError, edited
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, EDIT_LAYER
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.saving.export import export_merged, export_peft, read_peft
from edit_hooks.modeling.architectures import architecture_of


def assert_same_answers(first, second):
    for (left, left_greedy), (right, right_greedy) in zip(first[0], second[0], strict=True):
        assert math.isclose(left, right, **TOLERANCE) and left_greedy == right_greedy
    assert first[1] == second[1]


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_a_stock_model_with_the_adapter_answers_as_the_edited_model(model_type, tmp_path):
    model, tokenizer = build(model_type)
    path = save(model, tokenizer, tmp_path / "base")
    delta = random_delta(model, layers=(0, EDIT_LAYER), ranks=(1, 3))
    folder = export_peft(delta, tmp_path / "adapter", base_model=path)
    plain = harness_answers(HFLM(pretrained=path, device="cpu"))
    with_adapter = harness_answers(HFLM(pretrained=path, peft=str(folder), device="cpu"))
    with edited(model, delta):
        in_place = harness_answers(HFLM(pretrained=model, tokenizer=tokenizer))
    assert_same_answers(with_adapter, in_place)
    assert any(abs(one[0] - two[0]) > 1e-2 for one, two in zip(plain[0], in_place[0], strict=True))


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2"])
def test_the_product_of_the_adapter_is_the_update(model_type, tmp_path):
    model, _ = build(model_type)
    delta = random_delta(model, layers=(0, EDIT_LAYER), ranks=(1, 3))
    folder = export_peft(delta, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == 3 and config["fan_in_fan_out"] == (model_type == "gpt2")
    for name, factor in delta.factors.items():
        left = tensors[f"base_model.model.{name}.lora_B.weight"]
        right = tensors[f"base_model.model.{name}.lora_A.weight"]
        torch.testing.assert_close(left @ right, factor.left @ factor.right.T, rtol=0, atol=1e-6)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_stream_with_more_edits_than_the_weight_has_dimensions(model_type, tmp_path):
    model, _ = build(model_type)
    total = Delta.summed([random_delta(model, seed=seed, scale=0.05) for seed in range(30)])
    assert total.rank == 60 > model.config.hidden_size
    back = read_peft(export_peft(total, tmp_path / "adapter"), model)
    assert back.rank == model.config.hidden_size
    for name, update in total.weights().items():
        torch.testing.assert_close(back.weights()[name], update, rtol=0, atol=1e-5)


def test_adapters_of_peft_load(tmp_path):
    """An adapter with a scaling, ranks and alphas per module, against peft."""
    peft = pytest.importorskip("peft")
    model, _ = build("llama")
    names = [architecture_of(model).rewrite_name(layer) for layer in (0, 2)]
    config = peft.LoraConfig(
        r=2, lora_alpha=5, target_modules=names, rank_pattern={names[1]: 4}, alpha_pattern={names[1]: 3}
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload()
    with edited(model, read_peft(tmp_path / "adapter", model)):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, merged.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"), ({"peft_type": "IA3"}, "IA3"), ({"r": None}, "r")],
)
def test_adapters_that_are_more_than_low_rank_updates_are_refused(changes, message, tmp_path):
    model, _ = build("llama")
    folder = export_peft(random_delta(model), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(EditingError, match=message):
        read_peft(folder, model)


def test_edits_with_hooks_or_contexts_are_refused(tmp_path):
    model, tokenizer = build("llama")
    before = snapshot(model)
    context = Delta(contexts=(ContextEdit("Port Elna is the capital of", "Dravonia"),))
    for delta in (context, Delta(hook_edit=codebook(model))):
        with pytest.raises(EditingError, match="not all in the weights"):
            export_peft(delta, tmp_path / "adapter")
        with pytest.raises(EditingError, match="not all in the weights"):
            export_merged(model, tokenizer, delta, tmp_path / "merged")
    assert_same_state(before, snapshot(model))
    assert not list(tmp_path.iterdir())


def test_other_edits_are_refused_and_leave_no_files(tmp_path):
    model, _ = build("llama")
    name = architecture_of(model).rewrite_name(EDIT_LAYER)
    dense = Delta(dense={f"{name}.weight": torch.ones_like(model.get_submodule(name).weight)})
    with pytest.raises(EditingError, match="merged"):
        export_peft(dense, tmp_path / "adapter")
    with pytest.raises(EditingError, match="no weight"):
        export_peft(Delta(), tmp_path / "adapter")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(EditingError, match="not empty"):
        export_peft(random_delta(model), tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_a_merged_checkpoint_is_the_edited_model(model_type, dtype, tmp_path):
    model, tokenizer = build(model_type, dtype=dtype)
    name = architecture_of(model).rewrite_name(0)
    delta = random_delta(model)
    delta.dense[f"{name}.weight"] = torch.randn(model.get_submodule(name).weight.shape) * 0.1
    before = snapshot(model, tokenizer)
    folder = export_merged(model, tokenizer, delta, tmp_path / "merged")
    assert_same_state(before, snapshot(model, tokenizer))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == dtype
    with edited(model, delta):
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    if model.config.tie_word_embeddings:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert AutoTokenizer.from_pretrained(folder)("The harbour")["input_ids"] == tokenizer("The harbour")["input_ids"]
