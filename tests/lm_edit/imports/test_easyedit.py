"""Settings files of EasyEdit and of releases: translated, with what is given elsewhere and what has no counterpart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_verb

from edit_hooks import load_editor
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.yaml_io import read_yaml
from lm_edit.imports.easyedit import read_hparams

MEMIT = {
    "alg_name": "MEMIT",
    "model_name": "owner/name",
    "layers": [4, 5],
    "clamp_norm_factor": 0.75,
    "layer_selection": "all",
    "fact_token": "subject_last",
    "v_num_grad_steps": 20,
    "v_lr": "5e-1",
    "v_loss_layer": 31,
    "v_weight_decay": 0.5,
    "kl_factor": 0.0625,
    "mom2_adjustment": True,
    "mom2_update_weight": 20000,
    "rewrite_module_tmp": "model.layers.{}.mlp.down_proj",
    "mom2_n_samples": 100000,
}


def write(content: Any, path: Path) -> str:
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_every_setting_is_translated_or_named(tmp_path: Path) -> None:
    found = read_hparams(write(MEMIT, tmp_path / "memit.yaml"))
    assert found.editor == "memit"
    assert found.settings == {
        "layers": [4, 5],
        "clamp_factor": 0.75,
        "fact_token": "subject_last",
        "num_steps": 20,
        "lr": 0.5,
        "weight_decay": 0.5,
        "kl_factor": 0.0625,
        "second_moments": "published",
        "moment_weight": 20000,
    }
    assert found.without_counterpart == {"layer_selection": "all", "v_loss_layer": 31}
    assert {"alg_name", "model_name", "rewrite_module_tmp", "mom2_n_samples"} <= set(found.elsewhere)
    assert all(f"# {name}: " in found.text for name in found.elsewhere)
    assert "# without a counterpart: v_loss_layer: 31\n" in found.text


def test_the_file_is_one_of_settings_here(tmp_path: Path, capsys: Any) -> None:
    source, out = write(MEMIT, tmp_path / "memit.yaml"), tmp_path / "mine.yaml"
    assert run_verb(["import-easyedit", source, "--out", str(out)]) == 0
    assert "editor=memit" in capsys.readouterr().out
    assert load_editor("memit", str(out)).overrides == dict(read_yaml(out))
    assert run_verb(["import-easyedit", source]) == 0
    assert capsys.readouterr().out == out.read_text("utf-8")


@pytest.mark.parametrize(
    ("content", "editor", "settings"),
    [
        ({"alg_name": "R-ROME", "layers": [5], "v_lr": 0.5}, "r_rome", {"layers": [5], "lr": 0.5}),
        ({"alg_name": "AlphaEdit", "layers": [4], "L2": 10}, "alphaedit", {"layers": [4], "l2": 10}),
        (
            {"alg_name": "UNKE", "layers": [7], "v_lr": 0.5, "lr": 2e-4, "optim_num_step": 50},  # two learning rates
            "unke",
            {"layers": [7], "lr": 0.5, "fit_lr": 2e-4, "fit_steps": 50},
        ),
        (
            {"alg_name": "WISE", "inner_params": ["model.layers[27].mlp.down_proj.weight"], "n_iter": 70},
            "wise",
            {"layers": [27], "num_steps": 70},
        ),
        (
            {"alg_name": "FT", "layers": [21], "objective_optimization": "target_new", "norm_constraint": False},
            "ft_m",
            {"layers": [21], "norm_constraint": None},
        ),
        ({"alg_name": "FT", "layers": [21], "objective_optimization": "prompt_last"}, "ft_l", {"layers": [21]}),
    ],
)
def test_methods_have_their_editors(content: Any, editor: str, settings: Any, tmp_path: Path) -> None:
    found = read_hparams(write(content, tmp_path / "x.yaml"))
    assert (found.editor, found.settings) == (editor, settings) and not found.without_counterpart


def test_a_release_without_a_name_of_its_method_needs_one(tmp_path: Path) -> None:
    content = {"layers": [13], "v_lr": 0.5, "rewrite_module_tmp": "transformer.h.{}.mlp.c_proj"}
    path = write(content, tmp_path / "gpt2-xl.json")
    with pytest.raises(EditingError, match="name the editor: --editor memit"):
        read_hparams(path)
    assert read_hparams(path, "memit").settings == {"layers": [13], "lr": 0.5}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"alg_name": "QLoRA"}, "no editor for alg_name 'QLoRA'"),
        ({"lr": 0.5}, "needs no translation"),
        (["alg_name"], "needs no translation"),
        ({"alg_name": "MEMIT", "layers": ["four"]}, "layers"),
    ],
)
def test_other_files_are_named(content: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=problem):
        read_hparams(write(content, tmp_path / "x.yaml"))


def test_text_that_is_no_yaml_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: [", encoding="utf-8")
    with pytest.raises(EditingError, match=r"x\.yaml cannot be read"):
        read_hparams(str(path))
