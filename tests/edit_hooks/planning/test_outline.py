"""Sizes of weights from a configuration, against models that are loaded."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.planning.outline import FOUR_BITS, FOUR_BITS_DOUBLE, outline_of, read_config, stored_bits
from edit_hooks.utils.errors import EditingError

LLAMA_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2"])  # head of its own; tied; Conv1D and tied
def test_weights_take_what_the_loaded_model_does(model_type, tmp_path):
    folder = save_tiny(tmp_path, model_type)
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        outline = outline_of(read_config(str(folder)), dtype)
        assert outline.num_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
        assert all(parameter.is_meta for parameter in outline.model.parameters())


def test_a_model_over_two_devices(tmp_path):
    """The second device is the disk here, since there is no second one: what is not in memory is on it."""
    folder = save_tiny(tmp_path, "llama")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    device_map = {**places, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    size = {True: 0, False: 0}
    for parameter in model.parameters():
        size[parameter.is_meta] += parameter.numel() * parameter.element_size()
    sizes = outline_of(read_config(str(folder))).bytes_by_device(model.hf_device_map)
    assert sizes == {"cpu": size[False], "disk": size[True]} and size[True]


def test_an_even_spread_keeps_blocks_whole(tmp_path):
    outline = outline_of(read_config(str(save_tiny(tmp_path, "llama"))))
    sizes = outline.spread(2)
    block = sum(p.numel() * p.element_size() for p in outline.model.model.layers[0].parameters())
    assert sum(sizes.values()) == outline.num_bytes and len(sizes) == 2
    assert max(sizes.values()) - min(sizes.values()) <= 2 * block


def test_70b_in_four_bits():
    """Embedding and head stay in 16 bits; the other 68.5 billion entries take 4.5 bits each."""
    outline = outline_of(LlamaConfig(**LLAMA_70B), "bfloat16", FOUR_BITS)
    plain = 2 * 2 * 128256 * 8192 + 2 * 161 * 8192  # embedding, head, norms
    entries = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert outline.num_bytes == plain + entries * 9 // 16
    assert 39 < outline.num_bytes / 2**30 < 41
    first, second = outline.spread(2).values()
    assert first + second == outline.num_bytes and abs(first - second) < 2**30


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        ({"load_in_4bit": True}, FOUR_BITS),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, FOUR_BITS_DOUBLE),
        ({"load_in_8bit": True}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, 4 + 20 / 32),
    ],
)
def test_bits_of_quantized_checkpoints(stored, bits):
    assert stored_bits(stored) == bits


def test_what_cannot_be_planned_is_named(tmp_path):
    with pytest.raises(EditingError, match="'quanto', which states no number of bits"):
        stored_bits({"quant_method": "quanto"})
    with pytest.raises(EditingError, match=r"configuration of .*nothing cannot be read"):
        read_config(str(tmp_path / "nothing"))
    with pytest.raises(EditingError, match="no precision of weights"):
        outline_of(LlamaConfig(), "int8")
    with pytest.raises(EditingError, match="builds no causal model"):
        outline_of(AutoConfig.for_model("vit"))
    with pytest.raises(EditingError, match="places no module around"):
        outline_of(LlamaConfig(num_hidden_layers=1)).bytes_by_device({"lm_head": 0})


def test_the_precision_is_that_of_the_checkpoint():
    assert outline_of(LlamaConfig(num_hidden_layers=1, dtype="bfloat16")).model.dtype == torch.bfloat16
