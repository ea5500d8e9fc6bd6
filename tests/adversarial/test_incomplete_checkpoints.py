"""Weights that a checkpoint lacks would be random numbers: loading refuses, where transformers and peft only warn."""

from __future__ import annotations

import logging

import pytest
from exported import build as build_saved
from exported import save
from lm_runs import answers, build, run
from safetensors.torch import load_file, save_file

from edit_hooks import EditingError
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.deltas.saving.export import export_peft
from judges.backends.hf import HFBackend
from judges.settings import JudgeSettings

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def checkpoint(tmp_path):
    """A folder, its tensors, and a function that writes other ones."""
    folder = save_tiny(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")

    def write(changed):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})

    return str(folder), tensors, write


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


def incomplete(tensors):
    """Changed tensors, and what the refusal names."""
    yield without(tensors, DOWN), "lacks 1.*down_proj"
    yield without(tensors, "lm_head.weight"), "lacks 1.*lm_head"
    yield {**tensors, DOWN: tensors[DOWN][:, :32].contiguous()}, r"down_proj.weight \[32, 32\], the model's \[32, 64\]"
    renamed = {name.replace("model.", "transformer.", 1): tensor for name, tensor in tensors.items()}
    yield renamed, "lacks 29.*other names, such as transformer"


@pytest.mark.parametrize("number", range(4))
def test_incomplete_checkpoints_are_refused(checkpoint, number):
    folder, tensors, write = checkpoint
    changed, message = list(incomplete(tensors))[number]
    write(changed)
    for options in ({"mode": "none", "editor_args": {}}, {}):
        lm = build(folder, **options)
        with pytest.raises(EditingError, match=message):
            run(lm, ["bake_es"], limit=1)
    judge = HFBackend(JudgeSettings(backend="hf", model=folder, prompt="bake_judge", device="cpu"))
    with pytest.raises(EditingError, match=message):
        judge.complete([[{"role": "user", "content": "Yes?"}]], lambda *reply: None)


def test_weights_that_the_model_does_not_have_are_named_and_left_out(checkpoint, caplog):
    folder, tensors, write = checkpoint
    expected = answers(run(build(folder, mode="none", editor_args={}), ["bake_es"], limit=1))
    write({**tensors, "model.vision_tower.weight": tensors[DOWN].clone()})
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    try:
        found = answers(run(build(folder, mode="none", editor_args={}), ["bake_es"], limit=1))
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert "vision_tower" in caplog.text and found == expected


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "gemma3_text"])
def test_tied_weights_are_not_missing(model_type, tmp_path):
    folder = save_tiny(tmp_path, model_type)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert build(str(folder), mode="none", editor_args={}).model.config.tie_word_embeddings


def test_incomplete_adapters_of_the_peft_option_are_refused(tmp_path):
    pytest.importorskip("peft")
    from random_deltas import random_delta

    model, tokenizer = build_saved("llama")
    base = save(model, tokenizer, tmp_path / "base")
    folder = export_peft(random_delta(model, layers=(0, 1), ranks=(2, 2)), tmp_path / "adapter")
    assert answers(run(build(base, peft=str(folder)), ["bake_es"], limit=1))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    for changed, message in (
        (without(tensors, name), "lacks.*layers.1.mlp.down_proj.lora_B"),
        ({**tensors, name.replace("layers.1", "layers.7"): tensors[name].clone()}, "another base model.*layers.7"),
    ):
        save_file(changed, path, {"format": "pt"})
        lm = build(base, peft=str(folder))
        for _ in range(2):  # a second attempt does not find the model that was refused
            with pytest.raises(EditingError, match=message):
                run(lm, ["bake_es"], limit=1)
