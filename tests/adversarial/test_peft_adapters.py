"""Adapters of other tools: read as peft itself merges them, or refused with the reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from exported import build
from safetensors.torch import load_file, save_file

from edit_hooks import EditingError, edited
from edit_hooks.deltas.saving.export import read_peft
from edit_hooks.deltas.saving.peft_rules import is_target

peft = pytest.importorskip("peft", reason="adapters are compared with peft's own")


@pytest.fixture(scope="module")
def models():
    return {model_type: build(model_type)[0] for model_type in ("llama", "gpt2")}


def trained_adapter(model, folder, **settings):
    """Write an adapter with random weights, as peft does; return the model that peft merges."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    wrapped.save_pretrained(folder)
    # As a user reads it: peft's own loading decides what the files stand for.
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)
    return loaded.merge_and_unload()


DOWN = [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"r": 2, "lora_alpha": 16, "alpha_pattern": {r"layers\.[01]\.mlp\.down_proj": 2}}),
        ("llama", {"r": 2, "rank_pattern": {r".*\.1\.mlp\.down_proj": 4, "down_proj": 3}}),
        ("llama", {"r": 2, "rank_pattern": {r"^model\.layers\.2\..*": 5}, "alpha_pattern": {"2.mlp.down_proj": 1}}),
        ("llama", {"r": 2, "alpha_pattern": {"proj": 64, "own_proj": 32, r"mlp\.down_proj": 4}}),
        ("llama", {"r": 4, "lora_alpha": 3, "use_rslora": True}),
        ("llama", {"r": 2, "layers_to_transform": [0, 2]}),
        ("llama", {"r": 2, "layers_to_transform": 1, "layers_pattern": "layers"}),
        ("llama", {"r": 2, "exclude_modules": [r"1.mlp.down_proj"]}),
        ("llama", {"r": 2, "target_modules": r".*\.(q|down)_proj", "exclude_modules": r".*\.0\..*"}),
        ("llama", {"r": 2, "target_modules": "all-linear"}),
        ("llama", {"r": 2, "init_lora_weights": "gaussian"}),
        ("llama", {"r": 2, "init_lora_weights": False}),
        ("llama", {"r": 2, "init_lora_weights": "orthogonal"}),
        ("gpt2", {"r": 2, "target_modules": ["mlp.c_proj"], "fan_in_fan_out": True}),
        ("gpt2", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": False}),  # peft corrects it
        ("llama", {"r": 2, "fan_in_fan_out": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_read_as_peft_merges(model_type, settings, models, tmp_path):
    model = models[model_type]
    merged = trained_adapter(model, tmp_path / "adapter", **{"target_modules": ["down_proj"], **settings})
    delta = read_peft(tmp_path / "adapter", model)
    assert delta.factors
    with edited(model, delta):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, merged.state_dict()[name], rtol=0, atol=1e-6, msg=name)
    changed = {
        name for name, weight in model.state_dict().items() if not torch.equal(weight, merged.state_dict()[name])
    }
    assert changed == {f"{name}.weight" for name in delta.factors}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=olora"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [(0, 3), (1, 3)]}, "layer_replication"),
        ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_more_than_a_low_rank_update_is_refused(settings, message, models, tmp_path):
    """Each of them, read as a plain low-rank update, would give other weights than peft."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["down_proj"], r=2, **settings)
    wrapped = peft.get_peft_model(copy.deepcopy(models["llama"]), config)
    wrapped.save_pretrained(tmp_path / "adapter")
    with pytest.raises(EditingError, match=message):
        read_peft(tmp_path / "adapter", models["llama"])


def test_other_kinds_and_unknown_fields_are_refused(models, tmp_path):
    trained_adapter(models["llama"], tmp_path / "adapter", r=2, target_modules=["down_proj"])
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    for changes, message in (
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"a_field_of_a_later_release": 3}, "a_field_of_a_later_release"),
        ({"r": 3}, "says 3"),
        ({"rank_pattern": {"down_proj": 1}}, "says 1"),
        ({"lora_alpha": None}, "lora_alpha is None; a finite number is needed"),
    ):
        path.write_text(json.dumps({**config, **changes}))
        with pytest.raises(EditingError, match=message):
            read_peft(tmp_path / "adapter", models["llama"])


def test_a_default_configuration_of_peft_is_plain():
    from edit_hooks.deltas.saving.peft_rules import check_adapter_config

    check_adapter_config({**peft.LoraConfig().to_dict(), "peft_type": "LORA"}, Path("folder/adapter_config.json"))


def test_incomplete_adapters_are_refused(models, tmp_path):
    """peft only warns, and the modules without tensors would stay unedited."""
    trained_adapter(models["llama"], tmp_path / "adapter", r=2, target_modules=["down_proj", "q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    half = next(name for name in tensors if "lora_A" in name)
    module = half.partition(".lora_")[0]
    for dropped in (
        {half},
        {half.replace("lora_A", "lora_B")},
        {name for name in tensors if name.startswith(f"{module}.")},
    ):
        save_file({name: tensor for name, tensor in tensors.items() if name not in dropped}, path)
        with pytest.raises(EditingError, match="incomplete"):
            read_peft(tmp_path / "adapter", models["llama"])
    foreign = {name.replace("down_", "up_"): tensor.clone() for name, tensor in tensors.items() if "down_" in name}
    save_file({**tensors, **foreign}, path)
    with pytest.raises(EditingError, match="target_modules leave out"):
        read_peft(tmp_path / "adapter", models["llama"])


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "mlp.down_proj", "model.layers.1.mlp.up_proj"]},
        {"target_modules": r".*layers\.[02]\.(self_attn|mlp)\.\w+_proj"},
        {"target_modules": ["proj", "_proj", "down_proj"]},
        {"target_modules": ["down_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        {"target_modules": ["down_proj"], "layers_to_transform": [1, 2], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["down_proj"], "layers_to_transform": 0},
        {"target_modules": ["down_proj"], "layers_to_transform": []},
        {"target_modules": ["down_proj", DOWN[0]], "layers_to_transform": [1], "layers_pattern": []},
    ],
)
def test_targets_are_those_of_peft(settings, models):
    from peft.tuners.tuners_utils import check_target_module_exists

    config = peft.LoraConfig(**settings)
    for name, _ in models["llama"].named_modules():
        theirs = check_target_module_exists(config, name)
        assert is_target(settings, name) == bool(theirs and type(theirs).__name__ != "_ExcludedModule"), name
