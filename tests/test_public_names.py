"""Public names: they exist, load nothing heavy, are listed in stability.md, and are all that the templates import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGES = ("edit_hooks", "edit_hooks.training", "edit_hooks.contract", "judges", "lm_eval_tasks", "lm_edit")
PUBLIC = {package: importlib.import_module(package).__all__ for package in PACKAGES}
BY_PATH = "lm_eval_tasks.protocols."  # task files name its functions
STABLE = (ROOT / "docs/project/stability.md").read_text(encoding="utf-8")


def typed_names(package: str) -> set[str]:
    """The names that type checkers see in a package."""
    tree = ast.parse(Path(str(importlib.import_module(package).__file__)).read_text(encoding="utf-8"))
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def own_imports(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from our packages."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PUBLIC:
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert PUBLIC[package] and set(PUBLIC[package]) <= typed_names(package) & set(dir(module))
    assert all(getattr(module, name) is not None for name in PUBLIC[package])
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        module.unknown  # noqa: B018


def test_packages_are_imported_without_torch() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; print(sorted({{'torch', 'lm_eval', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_lists_them(package: str) -> None:
    """In the paragraph that begins with the name of the package."""
    (paragraph,) = [part for part in STABLE.split("\n\n") if re.match(rf"`{re.escape(package)}`[,:]", part)]
    assert re.findall(r"`(\w+)`", paragraph.partition(":")[2]) == list(PUBLIC[package])


def test_templates_import_public_names_only() -> None:
    files = [*(ROOT / "docs/templates").rglob("*.py"), ROOT / "tests/helpers/step_editor.py"]
    found = [(file.name, *imported) for file in files for imported in own_imports(file)]
    assert found
    assert not [
        (file, module, name)
        for file, module, name in found
        if not module.startswith(BY_PATH) and name not in PUBLIC.get(module, ())
    ]
