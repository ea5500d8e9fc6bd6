"""Every shipped configuration loads, names a known editor and family, fits the model it is for, and is found for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import build_model
from transformers import AutoConfig

from edit_hooks import EditingError, load_editor
from edit_hooks.architectures import ARCHITECTURES
from edit_hooks.configs import FOLDER, read_yaml, shipped_config, shipped_files
from edit_hooks.registry import EDITORS, editor_class

FILES = sorted(FOLDER.glob("*/*.yaml"))
LAYER_NAMES = ("num_hidden_layers", "n_layer")
WIDTH_NAMES = ("hidden_size", "n_embd")


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_there_are_files_for_the_models_of_the_papers():
    names = {name_of(path) for path in FILES}
    for editor in ("rome", "memit", "alphaedit", "emmet"):
        for model in ("gpt2-xl", "gpt-j-6b", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b"):
            assert f"{editor}/{model}" in names


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_complete_and_valid(path):
    content = read_yaml(path)
    assert set(content) == {"matches", "source", "config"}
    assert content["source"].strip()
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert path.parent.name in EDITORS
    config = editor_class(path.parent.name).config_class.from_mapping(content["config"])
    matches = content["matches"]
    assert matches["model_type"] in ARCHITECTURES
    (depth,) = (matches[name] for name in LAYER_NAMES if name in matches)
    assert any(name in matches for name in WIDTH_NAMES) and "vocab_size" in matches
    assert config.layers and max(config.layers) < depth
    defaults = editor_class(path.parent.name).config_class()
    repeated = {key for key in content["config"] if getattr(defaults, key) == getattr(config, key)}
    assert not repeated, f"{repeated} only repeat the defaults"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_found_for_its_model_and_for_no_other(path):
    matches = read_yaml(path)["matches"]
    config = AutoConfig.for_model(**matches)
    folder = path.parent.name
    fitting = [
        stem
        for stem, content in shipped_files(folder)
        if all(getattr(config, key, None) == value for key, value in content["matches"].items())
    ]
    assert fitting == [path.stem]
    assert shipped_config((folder,), config) == read_yaml(path)["config"]


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in FILES}))
def test_a_model_without_a_file_gets_layers_by_depth(folder):
    model = build_model("llama")
    config = load_editor(folder).config_for(model)
    assert config.layers and all(0 <= layer < model.config.num_hidden_layers for layer in config.layers)


def test_a_wrapper_uses_the_file_of_its_base():
    config = AutoConfig.for_model("gpt2", n_layer=48, n_embd=1600, vocab_size=50257)

    class Model:
        pass

    model = Model()
    model.config = config
    resolved = load_editor("rect").config_for(model)
    assert resolved.layers == [13, 14, 15, 16, 17] and resolved.base_settings["moment_weight"] == 20000
    resolved = load_editor("prune", {"base": "rome", "layers": [3]}).config_for(model)
    assert resolved.layers == [3] and resolved.base_settings["layers"] == [3]


def test_wrappers_refuse_what_makes_no_sense():
    with pytest.raises(EditingError, match="post-processes"):
        load_editor("rect", {"base": "prune"})
    with pytest.raises(EditingError, match=r"lrr.*Did you mean 'lr'"):
        load_editor("rect", {"base_settings": {"lrr": 0.1}})
    with pytest.raises(EditingError, match="Did you mean 'memit'"):
        load_editor("prune", {"base": "memitt"})
