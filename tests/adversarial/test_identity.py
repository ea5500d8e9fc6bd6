"""Whatever can change a number changes the identity of a model, so nothing stored is served to another one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from quantized_models import CodedLinear, replaced
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from warm_python import run_warm

from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, SPECIAL_TOKENS, build_model, build_tokenizer, save_tiny
from edit_hooks.modeling.fingerprint import identity as identity_module
from edit_hooks.modeling.fingerprint.identity import (
    ADAPTER_EXCLUSIONS,
    CONFIG_EXCLUSIONS,
    ModelIdentity,
    model_identity,
)
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest

FAMILIES = ("llama", "gpt2", "gemma3_text", "phi3")


def changed(value: Any) -> Iterator[Any]:
    """Other values of the same kind; for containers one per entry."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 1
        yield value * 1.0001 if isinstance(value, float) and value else value - 1
    elif isinstance(value, str):
        yield f"{value}_x"
    elif isinstance(value, dict):
        yield from ({**value, name: other} for name, entry in value.items() for other in changed(entry))
        yield {**value, "a_new_entry": 1}
    elif isinstance(value, (list, tuple)):
        yield [*value, value[-1] if value else 1]
        yield from ([*value[:i], other, *value[i + 1 :]] for i, entry in enumerate(value) for other in changed(entry))
    else:
        yield 1


def identity_of(model_type: str = "llama", **overrides: Any) -> ModelIdentity:
    return model_identity(build_model(model_type, **overrides), build_tokenizer(NATURAL_TOKENIZER[model_type]))


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_the_configuration_counts(model_type: str) -> None:
    """On unchanged weights: a field that no tensor shows changes the configuration's part alone."""
    model, tokenizer = build_model(model_type), build_tokenizer(NATURAL_TOKENIZER[model_type])
    configuration = model.config
    unchanged, fields = model_identity(model, tokenizer), configuration.to_dict()
    keys = {unchanged.key}
    for name, value in {**fields, "a_field_of_a_later_release": None}.items():
        if name == "model_type":  # belongs to the class of the configuration
            continue
        for other in changed(value):
            model.config = copy.deepcopy(configuration)
            attribute = f"_{name}" if isinstance(getattr(type(configuration), name, None), property) else name
            vars(model.config)[attribute] = other  # setattr would refuse values that the class knows to be wrong
            key = model_identity(model, tokenizer).key
            assert (key == unchanged.key) == (name in CONFIG_EXCLUSIONS), f"{name}={other!r}"
            keys.add(key)
    model.config = configuration
    assert model_identity(model, tokenizer) == unchanged
    assert len(keys) > len(fields) - len(CONFIG_EXCLUSIONS)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
        ("mistral", {"sliding_window": 2}),
        ("gemma2", {"final_logit_softcapping": 5.0}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("llama", {"attn_implementation": "eager"}),
        ("llama", {"eos_token_id": 5}),
    ],
)
def test_models_with_equal_weights_are_told_apart(model_type: str, overrides: dict[str, Any]) -> None:
    assert identity_of(model_type).key != identity_of(model_type, **overrides).key


# --- weights and modules ---------------------------------------------------------------------------------------------


def test_every_tensor_counts_and_is_hashed() -> None:
    model, tokenizer = build_model("gemma3_text"), build_tokenizer("unigram_bos")
    unchanged = model_identity(model, tokenizer).key
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert any("inv_freq" in name for name in tensors)  # not persistent
    for name, tensor in tensors.items():
        before = tensor.detach().clone()
        tensor.data.view(-1)[-1:] += 0.5
        assert model_identity(model, tokenizer).key != unchanged, name
        tensor.data.copy_(before)
    assert model_identity(model, tokenizer).key == unchanged
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # equal values, no longer tied
    assert model_identity(model, tokenizer).key != unchanged


def test_entries_that_trade_places_are_noticed() -> None:
    """Two entries at a distance of the modulus of the sums of release 0.1.0 left those sums unchanged."""
    first = torch.zeros(70_000)
    first[0], second = 1.0, torch.zeros(70_000)
    second[65521] = 1.0
    assert tensor_digest(first) != tensor_digest(second)
    assert tensor_digest(first) == tensor_digest(first.clone())
    assert len({tensor_digest(t) for t in (first, first.double(), first.view(7, 10_000), first.bool(), first[:0])}) == 5
    large = torch.arange(2**22, dtype=torch.float32)  # several chunks
    assert tensor_digest(large) == tensor_digest(large.clone()) != tensor_digest(large.flip(0))


def test_changed_modules_are_noticed() -> None:
    """Changes that neither the weights nor the configuration show."""

    def change_activation(model: Any) -> None:
        model.model.layers[1].mlp.act_fn = torch.nn.ReLU()

    def change_eps(model: Any) -> None:
        model.model.norm.variance_epsilon = 0.1

    def change_scaling(model: Any) -> None:
        model.model.layers[0].self_attn.scaling *= 2

    def change_end(model: Any) -> None:
        model.generation_config.eos_token_id = [1, 7]

    changes = (change_activation, change_eps, change_scaling, change_end)
    keys = {identity_of().key}
    for change in changes:
        model = build_model("llama")
        change(model)
        keys.add(model_identity(model, build_tokenizer("byte_bpe_bos")).key)
    assert len(keys) == 1 + len(changes)


def test_use_and_training_mode_do_not_count() -> None:
    model, tokenizer = build_model("gemma3_text"), build_tokenizer("unigram_bos")
    unchanged = model_identity(model, tokenizer)
    ids = tokenizer("The band", return_tensors="pt")["input_ids"]
    model.train()
    model.generate(ids, max_new_tokens=3, do_sample=False)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=7)
    tokenizer.padding_side = "left"
    model.model.rotary_emb.layer_types.reverse()  # made from a set, so its order differs between processes
    assert model_identity(model, tokenizer) == unchanged


def test_adapters_count() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(**settings: Any) -> Any:
        torch.manual_seed(0)
        config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **{"r": 2, "lora_alpha": 4, **settings})
        return get_peft_model(build_model("llama"), config)

    tokenizer = build_tokenizer("byte_bpe_bos")
    disabled, merged, scaled = adapted(), adapted(), adapted()
    disabled.base_model.disable_adapter_layers()
    merged.merge_adapter()
    scaled.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] *= 2
    models = [
        build_model("llama"),
        adapted(),
        adapted(lora_alpha=8),
        adapted(use_rslora=True),
        disabled,
        merged,
        scaled,
    ]
    identities = [model_identity(model, tokenizer) for model in models]
    assert len({identity.key for identity in identities}) == len(models)
    assert model_identity(adapted(), tokenizer) == identities[1]
    assert "peft" in identities[1].libraries and "peft" not in identities[0].libraries
    model = adapted()
    configuration = model.peft_config["default"]
    for name, value in configuration.to_dict().items():  # also those that leave no trace in a module
        vars(configuration)[name] = "another"
        is_unchanged = model_identity(model, tokenizer).adapters == identities[1].adapters
        assert is_unchanged == (name in ADAPTER_EXCLUSIONS), name
        vars(configuration)[name] = value


def test_the_package_of_quantized_maps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its release computes, as torch does."""
    model, tokenizer = build_model("llama"), build_tokenizer(NATURAL_TOKENIZER["llama"])
    plain = model_identity(model, tokenizer)
    monkeypatch.setattr(CodedLinear, "__module__", "accelerate.layers")  # any package that is installed
    coded = model_identity(replaced(model, CodedLinear), tokenizer)
    assert coded.libraries.keys() - plain.libraries.keys() == {"accelerate"} and coded.key != plain.key


@pytest.mark.parametrize("package", ["torch", "transformers", "tokenizers"])
def test_releases_of_libraries_count(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of()
    installed = identity_module._version
    monkeypatch.setattr(identity_module, "_version", lambda name: "0.0" if name == package else installed(name))
    assert identity_of().key != before.key and before.libraries[package] != "0.0"


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_every_rule_of_a_tokenizer_counts() -> None:
    model = build_model("llama")
    for kind in ("metaspace_bos", "unigram_bos"):
        rules = json.loads(build_tokenizer(kind).backend_tokenizer.to_str())
        keys = {model_identity(model, build_tokenizer(kind)).key}
        variants = 0
        for section in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"):
            for other in changed(rules[section]):
                variants += add_variant(keys, model, kind, {**rules, section: other})
        for option in set(rules["model"]) - {"vocab", "merges", "type"}:
            for other in changed(rules["model"][option]):
                variants += add_variant(keys, model, kind, {**rules, "model": {**rules["model"], option: other}})
        for other in changed_vocabulary(rules["model"]):
            variants += add_variant(keys, model, kind, {**rules, "model": other})
        variants += add_variant(keys, model, kind, {**rules, "normalizer": {"type": "Lowercase"}})
        assert len(keys) == 1 + variants and variants > 15, kind


def add_variant(keys: set[str], model: Any, kind: str, rules: dict[str, Any]) -> bool:
    """Add the key of changed rules; ``False`` if they are no tokenizer, or one that is written as before."""
    try:
        backend = Tokenizer.from_str(json.dumps(rules))
    except Exception:  # the library raises nothing narrower
        return False
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=128, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS[kind]
    )
    if tokenizer.backend_tokenizer.to_str() == build_tokenizer(kind).backend_tokenizer.to_str():
        return False
    before = len(keys)
    keys.add(model_identity(model, tokenizer).key)
    assert len(keys) == before + 1, "two tokenizers have one key"
    return True


def changed_vocabulary(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        first, second = list(vocabulary)[-2:]
        yield {**model, "vocab": {**vocabulary, first: vocabulary[second], second: vocabulary[first]}}
        yield {**model, "merges": model["merges"][:-1]}
        yield {**model, "merges": [*model["merges"][:-2], model["merges"][-1], model["merges"][-2]]}
    else:
        yield {**model, "vocab": [*vocabulary[:-1], [vocabulary[-1][0], -1.25]]}


def test_every_setting_in_the_files_of_a_tokenizer_counts(tmp_path: Path) -> None:
    model, folder = build_model("llama"), save_tiny(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    unchanged = model_identity(model, AutoTokenizer.from_pretrained(folder)).key
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    no_rule = {"backend", "is_local", "local_files_only", "tokenizer_class"}
    changes = [(name, other) for name, value in settings.items() if name not in no_rule for other in changed(value)]
    keys = set()
    for name, other in [*changes, ("split_special_tokens", True)]:
        path.write_text(json.dumps({**settings, name: other}))
        keys.add(model_identity(model, AutoTokenizer.from_pretrained(folder)).key)
        assert unchanged not in keys, f"{name}={other!r}"
    path.write_text(json.dumps(settings))
    roles = {"bos_token": settings["eos_token"], "eos_token": settings["bos_token"]}  # the rules stay as they are
    for option in ({"add_bos_token": False}, {"add_eos_token": True}, roles):
        keys.add(model_identity(model, AutoTokenizer.from_pretrained(folder, **option)).key)
    (folder / "chat_template.jinja").write_text("{{ messages[0] }}")
    keys.add(model_identity(model, AutoTokenizer.from_pretrained(folder)).key)
    assert len(keys) == len(changes) + 5 and unchanged not in keys


# --- the same model --------------------------------------------------------------------------------------------------


def test_the_same_model_has_one_key_in_every_process_and_folder(tmp_path: Path) -> None:
    ours, theirs = (save_tiny(tmp_path / name, "gemma3_text") for name in "ab")
    loaded = AutoModelForCausalLM.from_pretrained(ours), AutoTokenizer.from_pretrained(ours)
    script = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from edit_hooks.modeling.fingerprint.identity import model_identity
print(model_identity(*(kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))).key)
"""
    done = run_warm(["-c", script, str(theirs)], cwd=ROOT)  # with another order of sets
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == model_identity(*loaded).key == identity_of("gemma3_text").key
