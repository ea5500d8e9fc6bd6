"""The recipe for a model family, followed in a copy of the packages."""

from __future__ import annotations

from pathlib import Path

from package_copy import check_editors, copy_packages, insert
from paths import ROOT

from edit_hooks.contract.family_configs import FAMILY_CONFIGS

RECIPE = (ROOT / "docs/project/recipes.md").read_text(encoding="utf-8").split("## A model family")[1].split("\n## ")[0]
FAMILY = "exaone_moe"
CHECKS = "restore,effect,target,batch,rows"  # those that depend on the family
TINY_MODEL = '    "exaone_moe": {**_DECODER, **_DEEPSEEK_EXPERTS},'


def test_a_row_makes_a_family_on_which_weight_and_hook_editors_keep_the_contract(tmp_path: Path) -> None:
    assert FAMILY not in FAMILY_CONFIGS
    hooks = copy_packages(tmp_path) / "edit_hooks"
    insert(hooks / "contract" / "family_configs.py", "FAMILY_CONFIGS: dict[str, dict[str, Any]] = {", TINY_MODEL)
    editors = ("rome", "grace")  # changes weights, runs hooks
    done = check_editors(*([name, "--models", FAMILY, "--checks", CHECKS] for name in editors), path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(FAMILY) >= len(editors) and done.stdout.count(" 0 failed") == len(editors)


def test_the_recipe_names_the_table_and_the_commands() -> None:
    for words in ("`FAMILY_CONFIGS`", "families_table.py", "lm-edit check-model", "lm-edit check-editor"):
        assert words in RECIPE
