"""Every shipped configuration loads, names a known editor and family, and is selected for its model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_shapes import MODELS, model_like
from transformers import CONFIG_MAPPING, AutoConfig

from edit_hooks import load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.base.shipped import FOLDER, find_shipped, shipped_files
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.editors.ft_m import FTM
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.yaml_io import read_yaml

FILES = sorted(FOLDER.glob("*/*.yaml"))
LAYER_NAMES = ("num_hidden_layers", "n_layer")
WIDTH_NAMES = ("hidden_size", "n_embd")


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def edits_layers(folder: str) -> bool:
    """Whether the edits of a folder's editor are in blocks of the model."""
    return editor_class(folder).writes != ("context",)


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
            ("llama-2-7b", "llama-3-8b", "mistral-7b"),
            (FOUR_TO_EIGHT, 25, 0.1, 0.5, 0.75, 2e-2, 10.0),
        ),
        **dict.fromkeys(("qwen2.5-7b", "qwen3-8b"), (FOUR_TO_EIGHT, 26, 0.1, 0.5, 0.75, 2e-2, 10.0)),  # 25 updates
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
    config = load_editor(editor).default_config(model_like(MODELS[model]))
    assert tuple(getattr(config, name) for name in COLUMNS[editor]) == PUBLISHED[editor][model]


@pytest.mark.parametrize("editor", ["alphaedit", "evk_edit"])
def test_a_users_null_space_rule_takes_the_place_of_the_shipped_one(editor: str) -> None:
    """A shipped threshold decided even where the user had set nullspace_energy."""
    model = model_like(MODELS["gpt2-xl"])

    def rule(**settings: float | None) -> tuple[float | None, float]:
        config = load_editor(editor, settings).default_config(model)
        return config.nullspace_threshold, config.nullspace_energy

    assert rule() == (0.02, 0.1)
    assert rule(nullspace_energy=0.3) == (None, 0.3)
    assert rule(nullspace_threshold=0.5) == (0.5, 0.1)
    assert rule(nullspace_threshold=0.5, nullspace_energy=0.1) == (0.5, 0.1)  # as recorded in results
    with pytest.raises(EditingError, match="'nullspace_energy' and 'nullspace_threshold' are both given"):
        rule(nullspace_threshold=0.5, nullspace_energy=0.3)


@pytest.mark.parametrize("editor", ["alphaedit", "evk_edit"])
def test_given_projectors_take_the_place_of_second_moments(editor: str) -> None:
    """And of the rule of the null space: a shipped one is not recorded, and a user's is refused, not ignored."""
    model, projectors = model_like(MODELS["gpt2-xl"]), {13: torch.eye(2)}
    config = load_editor(editor, {"projectors": projectors, "l2": 5.0}).default_config(model)
    assert (config.nullspace_threshold, config.l2) == (None, 5.0)
    recorded = {**config.to_dict(), "projectors": projectors}
    assert load_editor(editor, recorded).default_config(model).to_dict() == config.to_dict()
    for name, value in {
        "second_moments": "published",
        "moment_tokens": 100,
        "moment_length": 64,
        "moment_dtype": "float64",
        "nullspace_threshold": 0.02,
        "nullspace_energy": 0.3,
    }.items():
        with pytest.raises(EditingError, match=f"'projectors' and '{name}' are both given"):
            load_editor(editor, {"projectors": projectors, name: value})


# Blocks, modules, lr and relative_update.
ULTRAEDIT = {
    "gpt-j-6b": (list(range(18, 27)), None, 1e-6, 0.006),
    "llama-3-8b": (
        [*range(11, 16), *range(18, 25)],
        {"gate": [11, 12, 13, 14, 15], "up": [18, 19, 20, 21, 22, 23, 24]},
        1e-6,
        0.006,
    ),
}


@pytest.mark.parametrize(
    ("model", "settings", "changed"),
    [
        ("llama-3-8b", {}, {}),
        ("llama-3-8b", {"relative_update": 0.5}, {"lr": None, "relative_update": 0.5}),
        ("llama-3-8b", {"lr": 1e-4}, {"lr": 1e-4}),
        ("llama-3-8b", {"layers": [5, 6]}, {"layers": [5, 6], "modules": None}),
        ("llama-3-8b", {"modules": {"up": [5]}}, {"layers": [5], "modules": {"up": [5]}}),
        ("gpt-j-6b", {"modules": {"up": [5]}}, {"layers": [5], "modules": {"up": [5]}}),
        ("gpt-j-6b", {"layers": [5]}, {"layers": [5]}),
    ],
)
def test_a_users_setting_of_ultraedit_takes_the_place_of_the_shipped_alternative(
    model: str, settings: dict[str, Any], changed: dict[str, Any]
) -> None:
    """A shipped lr decided although the user had set relative_update; layers beside shipped modules were refused."""
    names = ("layers", "modules", "lr", "relative_update")
    config = load_editor("ultraedit", settings).default_config(model_like(MODELS[model]))
    expected = {**dict(zip(names, ULTRAEDIT[model], strict=True)), **changed}
    assert {name: getattr(config, name) for name in names} == expected
    recorded = load_editor("ultraedit", config.to_dict()).default_config(model_like(MODELS[model]))
    assert recorded == config  # as in the results of a run, where all settings are given


def test_a_user_who_sets_both_sizes_of_ultraedits_step_is_told() -> None:
    """The lr decided in silence."""
    with pytest.raises(EditingError, match="'lr' and 'relative_update' are both given"):
        load_editor("ultraedit", {"lr": 1e-4, "relative_update": 0.5})
    with pytest.raises(EditingError, match="'lr' and 'relative_update' are both given"):
        load_editor("rect", {"base": "ultraedit", "base_settings": {"lr": 1e-4, "relative_update": 0.5}})


def test_a_users_lr_drops_a_shipped_relative_update() -> None:
    """No shipped file has one; a file of another package may."""
    overridden = editor_class("ultraedit").config_class.overridden
    assert overridden({"relative_update": 0.01, "ridge": 2.0}, {"lr": 0.1}) == {"ridge": 2.0, "lr": 0.1}


@pytest.mark.parametrize("editor", PUBLISHED)
def test_the_demo_model_has_its_own_files(editor):
    origin = load_editor(editor).settings_origin(model_like(MODELS["gemma-3-270m"]))
    assert origin.layers and max(origin.layers) < 18 and not origin.by_depth and len(origin.shipped) == 1


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_complete_and_valid(path):
    content = read_yaml(path)
    assert set(content) - {"training"} == {"matches", "source", "config"}  # trainings: test_config_sources
    assert content["source"].strip()
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert path.parent.name in EDITORS
    config = editor_class(path.parent.name).config_class.from_mapping(content["config"])
    matches = content["matches"]
    assert matches["model_type"] in CONFIG_MAPPING
    (depth,) = (matches[name] for name in LAYER_NAMES if name in matches)
    assert any(name in matches for name in WIDTH_NAMES) and "vocab_size" in matches
    if issubclass(editor_class(path.parent.name), PostProcessingEditor):
        assert not set(content["config"]) & {"layers", "base", "base_settings"}  # the base has files of its own
    elif edits_layers(path.parent.name):
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
    assert find_shipped((folder,), config)[:2] == (f"{folder}/{path.name}", read_yaml(path)["config"])


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in FILES if edits_layers(path.parent.name)}))
def test_a_model_without_a_file_gets_layers_by_depth(folder):
    model = build_model("llama")
    config = load_editor(folder).default_config(model)
    assert config.layers and all(0 <= layer < model.config.num_hidden_layers for layer in config.layers)


def test_the_settings_of_another_model_move_with_the_depth():
    """Blocks keep number and gaps, the last one its relative depth; everything else is the file's."""
    demo = model_like(MODELS["gemma-3-270m"])  # 18 blocks
    config = load_editor("memit", {"shipped": "llama-3-8b"}).default_config(demo)
    assert config.layers == [0, 1, 2, 3, 4]  # 8 of 31 is 4 of 17
    assert (config.lr, config.clamp_factor, config.weight_decay) == (0.1, 0.75, 0.5)
    assert load_editor("rome", {"shipped": "gpt2-xl"}).default_config(demo).layers == [6]
    modules = load_editor("ultraedit", {"shipped": "llama-3-8b"}).default_config(demo).modules
    assert modules == {"gate": [4, 5, 6, 7, 8], "up": [7, 8, 9, 10, 11, 12, 13]}
    assert load_editor("memit", {"shipped": "gpt2-xl", "layers": [9]}).default_config(demo).layers == [9]
    wrapped = load_editor("rect", {"base": "memit", "base_settings": {"shipped": "llama-3-8b"}}).default_config(demo)
    assert wrapped.layers == [0, 1, 2, 3, 4] and wrapped.base_settings["lr"] == 0.1


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_can_be_used_for_another_depth(path):
    editor = load_editor(path.parent.name, {"shipped": path.stem})
    for name in ("gemma-3-270m", "qwen3-8b"):
        model = model_like(MODELS[name])
        config = editor.default_config(model)
        if not edits_layers(editor.name):
            assert {key: getattr(config, key) for key in read_yaml(path)["config"]} == read_yaml(path)["config"]
            continue
        assert config.edited_layers and max(config.edited_layers) < model.config.num_hidden_layers


def test_a_single_block_keeps_its_distance_to_the_edited_ones():
    config = load_editor("melo", {"shipped": "gpt2-xl"}).default_config(model_like(MODELS["gemma-3-270m"]))
    assert (config.layers, config.query_layer) == ([12, 13], 11)  # 36 and 37, and 35, of 48


def test_blocks_below_the_first_are_left_out():
    config = load_editor("lora", {"shipped": "llama-2-7b"}).default_config(model_like(MODELS["gemma-3-270m"]))
    assert config.layers == list(range(18))


@pytest.mark.parametrize(
    ("editor", "message"),
    [("memit", r"no file 'lama-3-8b'.*Did you mean 'llama-3-8b'"), ("rect", "has no shipped settings of its own")],
)
def test_an_unknown_file_is_refused_before_a_model_is_loaded(editor, message):
    with pytest.raises(EditingError, match=message):
        load_editor(editor, {"shipped": "lama-3-8b"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("match: {n_layer: 3}\nconfig: {}\nsource: ours", "'match'. Did you mean 'matches'?"),
        ("matches: {n_layer: 3}\nsource: ours", "a mapping is needed as 'config'"),
        ("matches: {n_layer: 3}\nconfig: {num_step: 3}\nsource: ours", "Did you mean 'num_steps'"),
        (None, "is not there; ship it with the editor"),
    ],
)
def test_a_settings_file_of_an_own_editor_is_named_with_its_mistake(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    class OwnEditor(FTM):
        config_folders = (str(tmp_path / "settings"),)

    if text is not None:
        (tmp_path / "settings").mkdir()
        (tmp_path / "settings" / "tiny.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(EditingError) as error:
        OwnEditor({}).default_config(build_model("gpt2"))
    assert problem in str(error.value) and str(tmp_path / "settings") in str(error.value)
