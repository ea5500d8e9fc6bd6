"""Import cost: an editor's module loads no room that the editor does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Editor module -> rooms and packages that importing it must not load.
UNUSED = {
    "ft_m": ("locate", "memory", "in_context", "assets", "training", "lm", "inference"),
    "rome": ("gradient", "memory", "in_context", "assets", "training", "lm", "inference"),
    "ike": ("locate", "gradient", "memory", "training", "lm", "inference"),
}
PACKAGES = ("lm_eval", "sentence_transformers", "peft", "datasets")


def modules_after_import(module: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after importing ``module``."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("editor", UNUSED)
def test_an_editor_loads_only_the_rooms_it_uses(editor):
    loaded = modules_after_import(f"edit_hooks.editors.{editor}")
    assert f"edit_hooks.editors.{editor}" in loaded
    assert not loaded & {f"edit_hooks.{room}" for room in UNUSED[editor]}
    assert not loaded & set(PACKAGES)
    others = {name for name in loaded if name.startswith("edit_hooks.editors.")} - {f"edit_hooks.editors.{editor}"}
    assert not others
