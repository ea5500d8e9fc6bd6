"""Models that nothing is published for take the settings of others, and count as untuned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edit_hooks.base.kin import KIN, Kin, kin_of
from edit_hooks.base.registry import EDITORS, editor_class, load_editor
from edit_hooks.base.shipped import find_shipped, shipped_files


def config_of(name: str) -> Any:
    (kin,) = (kin for kin in KIN if kin.name == name)
    heads = next(heads for heads in (16, 8, 9, 6) if kin.width % heads == 0)
    shape = {"num_hidden_layers": kin.depth, "hidden_size": kin.width, "vocab_size": 128256}
    return AutoConfig.for_model(kin.model_type, **shape, num_attention_heads=heads, num_key_value_heads=heads)


def outline(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name))


def test_shapes_are_unique_and_the_files_exist() -> None:
    assert len({kin[1:4] for kin in KIN}) == len(KIN)
    stems = {
        stem for name in EDITORS for folder in editor_class(name).config_folders for stem, _ in shipped_files(folder)
    }
    assert {name for kin in KIN for name in kin.like} <= stems


@pytest.mark.parametrize(
    ("model", "editor", "file", "layers"),
    [
        ("Qwen3 0.6B", "rome", "rome/qwen3-8b.yaml", [4]),  # 5 of 36 blocks
        ("Qwen3 32B", "memit", "memit/qwen3-8b.yaml", [10, 11, 12, 13, 14]),  # 4 to 8 of 36
        ("Qwen3 8B", "grace", "grace/qwen2.5-7b.yaml", None),  # without a file of its own
        ("Gemma 3 4B", "rome", "rome/gemma-3-270m.yaml", None),
        ("SmolLM and SmolLM2 135M", "memit", "memit/llama-3.2-3b.yaml", [5, 6, 7, 8, 9]),
        ("SmolLM and SmolLM2 135M", "r_rome", "rome/llama-3.2-3b.yaml", [5]),  # its second folder
        ("OLMo 2 7B", "alphaedit", "alphaedit/llama-3-8b.yaml", [4, 5, 6, 7, 8]),
    ],
)
def test_blocks_move_to_the_depth_and_the_origin_is_named(model, editor, file, layers):
    made, built = load_editor(editor), outline(model)
    origin, config = made.settings_origin(built), made.default_config(built)
    assert origin.shipped == (file,) and (layers is None or config.layers == layers)
    assert origin.is_guess and origin.by_rule and not origin.by_depth
    assert "with its blocks by depth" in str(origin) and f"a rule gives {model} these settings" in str(origin)
    assert "lm-edit tune" in str(origin)


@pytest.mark.parametrize(("editor", "layers"), [("rome", [5]), ("memit", [4, 5, 6, 7, 8])])
def test_what_is_published_comes_first(editor, layers):
    made, built = load_editor(editor), outline("Llama 3.2 1B")
    assert made.settings_origin(built).shipped == (f"{editor}/llama-3.2-1b.yaml",)
    assert not made.settings_origin(built).is_guess and made.default_config(built).layers == layers
    other = load_editor("ft_m").settings_origin(built)
    assert other.shipped == ("ft_m/llama-3.2-3b.yaml",) and other.is_guess


def test_a_wrapper_has_the_guess_of_its_base() -> None:
    origin = load_editor("rect").settings_origin(outline("Qwen3 4B"))
    assert origin.shipped == ("memit/qwen3-8b.yaml",) and origin.is_guess


def test_a_user_who_names_a_file_gets_it_and_others_get_none() -> None:
    built = outline("Qwen3 4B")
    named = load_editor("rome", {"shipped": "llama-3-8b"}).settings_origin(built)
    assert named.shipped == ("rome/llama-3-8b.yaml",) and not named.by_rule
    config = config_of("Qwen3 4B")
    config.hidden_size += 16
    assert kin_of(config) is None and find_shipped(("rome",), config).file is None


def test_an_editor_with_none_of_the_files_has_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edit_hooks.base.kin.KIN", (Kin("alone", "qwen3", 36, 2560, ("nothing",)),))
    assert find_shipped(("rome",), config_of("Qwen3 4B")).file is None
