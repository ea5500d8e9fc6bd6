"""Every shipped configuration loads, names a known editor and family, fits the model it is for, and is found for it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from tiny import build_model
from transformers import AutoConfig

from edit_hooks import EditingError, load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.base.shipped import FOLDER, shipped_config, shipped_files
from edit_hooks.base.wrapper import PostProcessingEditor
from edit_hooks.modeling.architectures import ARCHITECTURES
from edit_hooks.utils.yaml_io import read_yaml

FILES = sorted(FOLDER.glob("*/*.yaml"))
LAYER_NAMES = ("num_hidden_layers", "n_layer")
WIDTH_NAMES = ("hidden_size", "n_embd")


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


# The shapes by which a model is recognized, from the models' own configurations.
MODELS = {
    "gpt2-xl": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "vocab_size": 50257},
    "gpt-j-6b": {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "vocab_size": 50400},
    "llama-2-7b": {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000},
    "llama-3-8b": {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256},
    "mistral-7b": {"model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000},
    "qwen2.5-7b": {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "vocab_size": 152064},
    "qwen3-8b": {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 151936},
    "gemma-3-270m": {"model_type": "gemma3_text", "num_hidden_layers": 18, "hidden_size": 640, "vocab_size": 262144},
}
ROME_COLUMNS = ("layers", "num_steps", "lr", "weight_decay", "clamp_factor")
COLUMNS = {
    "rome": ROME_COLUMNS,
    "r_rome": ROME_COLUMNS,
    "memit": (*ROME_COLUMNS, "moment_weight"),
    "alphaedit": (*ROME_COLUMNS, "nullspace_threshold", "l2"),
    "emmet": (*ROME_COLUMNS, "moment_weight", "ridge", "identity_weight"),
    "ft_m": ("layers", "num_steps", "lr", "norm_constraint"),
}
FOUR_TO_EIGHT, THREE_TO_EIGHT, THIRTEEN_ON = [4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8], [13, 14, 15, 16, 17]
LATE_ROME = ([5], 25, 0.5, 1e-3, 4.0)
# Published values (or those of the neighbor that the file names), as an editor ends up with them: defaults and file.
PUBLISHED = {
    "rome": {
        "gpt2-xl": ([17], 20, 0.5, 0.5, 4.0),
        "gpt-j-6b": ([5], 20, 0.5, 0.5, 4.0),
        **dict.fromkeys(("llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"), LATE_ROME),
    },
    "memit": {
        "gpt2-xl": (THIRTEEN_ON, 20, 0.5, 0.5, 0.75, 20000),
        "gpt-j-6b": (THREE_TO_EIGHT, 25, 0.5, 0.5, 0.75, 15000),
        "llama-3-8b": (FOUR_TO_EIGHT, 25, 0.1, 0.5, 0.75, 15000),
        **dict.fromkeys(
            ("llama-2-7b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"), (FOUR_TO_EIGHT, 25, 0.5, 1e-3, 4.0, 15000)
        ),
    },
    "alphaedit": {
        "gpt2-xl": (THIRTEEN_ON, 20, 0.5, 0.5, 0.75, 2e-2, 10.0),
        "gpt-j-6b": (THREE_TO_EIGHT, 25, 0.5, 0.5, 0.75, 2e-2, 10.0),
        **dict.fromkeys(
            ("llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"),
            (FOUR_TO_EIGHT, 25, 0.1, 0.5, 0.75, 2e-2, 10.0),
        ),
    },
    "emmet": {
        "gpt2-xl": ([17], 20, 0.5, 0.5, 0.75, 10000, 0.1, 0.0),
        "gpt-j-6b": ([5], 25, 0.5, 0.5, 0.75, 100000, 0.1, 0.0),
        **dict.fromkeys(
            ("llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"),
            ([5], 25, 0.5, 1e-3, 4.0, 100000, 0.1, 0.0),
        ),
    },
    "ft_m": {
        "gpt2-xl": ([0], 25, 5e-4, 5e-4),
        "mistral-7b": ([21], 25, 5e-4, 5e-5),
        **dict.fromkeys(("gpt-j-6b", "llama-2-7b", "llama-3-8b"), ([21], 25, 5e-4, None)),
        "qwen2.5-7b": ([27], 25, 5e-4, None),
        "qwen3-8b": ([35], 25, 5e-4, None),
    },
}
PUBLISHED["r_rome"] = PUBLISHED["rome"]


@pytest.mark.parametrize("editor", PUBLISHED)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "gemma-3-270m"])
def test_an_editor_ends_up_with_the_published_values(editor, model):
    config = load_editor(editor).default_config(like(MODELS[model]))
    assert tuple(getattr(config, name) for name in COLUMNS[editor]) == PUBLISHED[editor][model]


@pytest.mark.parametrize("editor", PUBLISHED)
def test_the_demo_model_has_its_own_files(editor, caplog):
    config = load_editor(editor).default_config(like(MODELS["gemma-3-270m"]))
    assert config.layers and max(config.layers) < 18 and "by depth" not in caplog.text


def like(shape):
    """Something with a config of this shape, which is all that choosing settings needs."""

    class Model:
        config = AutoConfig.for_model(**shape)

    return Model()


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
    if issubclass(editor_class(path.parent.name), PostProcessingEditor):
        assert not set(content["config"]) & {"layers", "base", "base_settings"}  # the base has files of its own
    else:
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
    config = load_editor(folder).default_config(model)
    assert config.layers and all(0 <= layer < model.config.num_hidden_layers for layer in config.layers)


def test_a_wrapper_uses_the_file_of_its_base():
    model = like(MODELS["gpt2-xl"])
    resolved = load_editor("rect").default_config(model)
    assert resolved.layers == [13, 14, 15, 16, 17] and resolved.base_settings["moment_weight"] == 20000
    resolved = load_editor("prune", {"base": "rome", "layers": [3]}).default_config(model)
    assert resolved.layers == [3] and resolved.base_settings["layers"] == [3]


def test_wrappers_refuse_what_makes_no_sense():
    with pytest.raises(EditingError, match="post-processes"):
        load_editor("rect", {"base": "prune"})
    with pytest.raises(EditingError, match="changes hooks; an editor of weights"):
        load_editor("rect", {"base": "grace"})
    with pytest.raises(EditingError, match=r"lrr.*Did you mean 'lr'"):
        load_editor("rect", {"base_settings": {"lrr": 0.1}})
    with pytest.raises(EditingError, match="Did you mean 'memit'"):
        load_editor("prune", {"base": "memitt"})


@pytest.mark.parametrize(
    ("editor", "old", "new"),
    [
        ("mend", {"artefact": "identity"}, {"artifact": "identity"}),
        ("mend", {"normalise": False}, {"normalize": False}),
        ("memit", {"residual_mode": "normalised"}, {"residual_mode": "normalized"}),
        ("pmet", {"residual_mode": "normalised"}, {"residual_mode": "normalized"}),
        ("ice", {"states_fact": False}, {"include_fact": False}),
        ("ike", {"min_likeness": 0.5}, {"min_similarity": 0.5}),
    ],
)
def test_earlier_names_of_settings_still_work_with_a_warning(editor, old, new):
    with pytest.warns(FutureWarning, match="is now called"):
        renamed = load_editor(editor, old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        current = load_editor(editor, new)
    assert renamed.overrides == current.overrides == new
    with pytest.raises(EditingError, match="unknown editor setting"):  # both names at once cannot be meant
        load_editor(editor, {**old, **new} if old.keys() != new.keys() else {"residual_mod": 1})
