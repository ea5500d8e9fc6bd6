"""The recipe for an editor, followed in a temporary folder: as a package, and as part of this project."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lm_runs import build, run
from package_copy import check_editors, copy_packages, insert, lm_edit, run_python
from paths import ROOT
from templates import TEMPLATES, copy_template

from edit_hooks import EditingError, load_editor
from edit_hooks.base import registry
from edit_hooks.contract import run_contract
from edit_hooks.contract.tiny_models import save_tiny
from lm_edit.cli.main import main

RECIPE = (ROOT / "docs/project/recipes.md").read_text(encoding="utf-8").split("## An editor")[1].split("\n## ")[0]
WORDS = {"my_editor": "town_editor", "my-editor": "town-editor", "MyEditor": "TownEditor"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the renamed template."""
    folder = tmp_path_factory.mktemp("editor")
    package = copy_template("editor", folder / "package", WORDS)
    (line,) = re.findall("`(config_folders = .*?)`", (package / "README.md").read_text(encoding="utf-8"))
    insert(package / "town_editor.py", '    name = "town_editor"', f"    {line}")
    insert(package / "town_editor.py", "from dataclasses import dataclass", "from pathlib import Path")
    (package / "town_editor_configs").mkdir()
    (package / "town_editor_configs" / "gpt2-xl.yaml").write_text(SETTINGS, encoding="utf-8")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site"), str(package)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture
def importable(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installed package on the import path of this process."""
    monkeypatch.syspath_prepend(str(site))
    registry._registered.cache_clear()
    yield site
    registry._registered.cache_clear()
    sys.modules.pop("town_editor", None)


def test_the_recipe_names_the_template_and_its_commands() -> None:
    assert "`docs/templates/editor/`" in RECIPE and TEMPLATES.joinpath("editor", "my_editor.py").is_file()
    readme = TEMPLATES.joinpath("editor", "README.md").read_text(encoding="utf-8")
    for words in ("lm-edit check-editor my_editor", "lm-edit editors my_editor", "editor=my_editor:MyEditor"):
        assert words in readme
    assert f'[project.entry-points."{registry.ENTRY_POINTS}"]' in (TEMPLATES / "editor/pyproject.toml").read_text()


def test_an_installed_package_passes_the_contract_by_its_name(site: Path, tmp_path: Path) -> None:
    done = lm_edit("check-editor", "town_editor", "--models", "gemma3_text", path=site, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restore" in done.stdout and " 0 failed" in done.stdout


def test_an_installed_package_is_listed_and_described(importable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["editors"]) == 0 and "town_editor" in capsys.readouterr().out
    assert main(["editors", "town_editor"]) == 0 and "Adam steps per edit" in capsys.readouterr().out


def test_an_installed_package_brings_its_settings(site: Path, tmp_path: Path) -> None:
    done = run_python("-c", DEFAULTS, path=site, folder=tmp_path)
    assert done.stdout.strip() == "[17] 25", done.stdout + done.stderr


def test_an_installed_package_runs_in_the_harness(importable: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "gpt2")
    lm = build(str(model), editor="town_editor", editor_args={"layers": [1], "num_steps": 20, "lr": 0.01})
    results = run(lm, ["bake_es"])["results"]["bake_es"]
    assert results["efficacy_prob,none"] > 0.9


def test_a_class_in_the_working_folder_is_checked_without_installation(tmp_path: Path) -> None:
    folder = copy_template("editor", tmp_path, WORDS)
    words = ["check-editor", "town_editor:TownEditor", "--models", "llama", "--checks", "restore,effect"]
    done = lm_edit(*words, path=ROOT, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 0 failed" in done.stdout


def test_the_hook_editor_of_the_template_keeps_the_contract(tmp_path: Path) -> None:
    folder = copy_template("editor", tmp_path, WORDS)
    done = lm_edit("check-editor", "my_hook_editor:MyHookEditor", "--models", "llama,gpt2", path=ROOT, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows           ok     ok" in done.stdout and " 0 failed, 0 exempt" in done.stdout


def test_the_prompt_editor_of_the_template_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TEMPLATES / "editor"))
    results = list(run_contract("my_prompt_editor:MyPromptEditor", ["llama"]))
    outcomes = {result.check: result.outcome for result in results}
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == {"target"}, outcomes


def test_an_installed_package_brings_its_kind_of_hooks(site: Path, tmp_path: Path) -> None:
    """A saved edit names the kind alone, and is used where the editor is not."""
    code = "from edit_hooks.deltas.hook_edit import kind_class; print(kind_class('my_hooks').__name__)"
    done = run_python("-c", code, path=site, folder=tmp_path)
    assert done.stdout.strip() == "MyHooks", done.stdout + done.stderr


@pytest.mark.parametrize("settings", [{"lr": math.nan}, {"lr": 0.0}, {"num_steps": 0}])
def test_settings_out_of_their_range_are_refused(importable: Path, settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(EditingError, match=name):
        load_editor("town_editor", settings).known_config()


SETTINGS = """
matches: {model_type: gpt2, n_layer: 48, n_embd: 1600}
config: {layers: [17], num_steps: 25}
source: ours
"""
DEFAULTS = """
from types import SimpleNamespace
from transformers import GPT2Config
from edit_hooks import load_editor
config = load_editor("town_editor").default_config(SimpleNamespace(config=GPT2Config(n_layer=48, n_embd=1600)))
print(config.layers, config.num_steps)
"""


def test_a_file_and_a_row_make_a_built_in_editor(tmp_path: Path) -> None:
    hooks = copy_packages(tmp_path) / "edit_hooks"
    template = copy_template("editor", tmp_path / "template", WORDS)
    shutil.move(template / "town_editor.py", hooks / "editors" / "town_editor.py")
    name = '    name = "town_editor"'
    insert(hooks / "editors" / "town_editor.py", name, '    config_folders = ("town_editor",)')
    (hooks / "configs" / "town_editor").mkdir()
    (hooks / "configs" / "town_editor" / "gpt2-xl.yaml").write_text(SETTINGS, encoding="utf-8")
    row = '    "town_editor": EditorRow("edit_hooks.editors.town_editor:TownEditor"),'
    insert(hooks / "base" / "registry.py", "MORE: dict[str, EditorRow] = {", row)
    words = ["town_editor", "--models", "llama", "--checks", "restore,effect"]
    done = check_editors(words, path=tmp_path, then=DEFAULTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[17] 25", done.stderr
