"""CONTRIBUTING's recipe for a model family, followed in a copy of the packages."""

from __future__ import annotations

from pathlib import Path

from package_copy import check_editors, copy_packages, insert
from paths import ROOT

from edit_hooks.modeling.architectures import ARCHITECTURES

RECIPE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("### A model family")[1].split("\n### ")[0]
FAMILY = "starcoder2"
ARCHITECTURE = """\
    "starcoder2": replace(
        _LLAMA,
        rewrite="model.layers.{}.mlp.c_proj",
        mlp_in=("model.layers.{}.mlp.c_fc",),
    ),"""
CHECKS = "restore,effect,target,batch,padding,rows"  # those that depend on the family
TINY_MODEL = '    "starcoder2": {**_LLAMA, "sliding_window": None, "tie_word_embeddings": True},'


def test_three_rows_make_a_family_on_which_weight_and_hook_editors_keep_the_contract(tmp_path: Path) -> None:
    assert FAMILY not in ARCHITECTURES
    hooks = copy_packages(tmp_path) / "edit_hooks"
    insert(hooks / "modeling" / "architectures.py", "ARCHITECTURES: dict[str, Architecture] = {", ARCHITECTURE)
    tiny_models = hooks / "contract" / "tiny_models.py"
    insert(tiny_models, "MODEL_CONFIGS: dict[str, dict[str, Any]] = {", TINY_MODEL)
    insert(tiny_models, "NATURAL_TOKENIZER = {", f'    "{FAMILY}": "byte_bpe",')
    editors = ("memit", "grace")  # changes weights, runs hooks
    done = check_editors(*([name, "--models", FAMILY, "--checks", CHECKS] for name in editors), path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(FAMILY) >= len(editors) and done.stdout.count(" 0 failed") == len(editors)


def test_the_recipe_names_the_tables_and_the_command() -> None:
    for words in ("`ARCHITECTURES`", "`MODEL_CONFIGS`", "`NATURAL_TOKENIZER`", "lm-edit check-editor"):
        assert words in RECIPE
