"""Import cost: an editor's module loads no room that the editor does not use."""

from __future__ import annotations

import os

import pytest
from paths import ROOT
from warm_python import run_warm

# Editor module -> rooms and packages that importing it must not load.
UNUSED = {
    "ft_m": ("locate", "memory", "in_context", "assets", "training", "lm", "inference"),
    "rome": ("gradient", "memory", "in_context", "assets", "training", "lm", "inference"),
    "ike": ("locate", "gradient", "memory", "training", "lm", "inference"),
}
PACKAGES = ("lm_eval", "sentence_transformers", "peft", "datasets")


# Imports once what every editor loads, and each editor in a child of that process, which finds no package of PACKAGES.
CODE = """
import importlib, os, sys
import torch, transformers.modeling_utils, edit_hooks
for name in list(sys.modules):
    if name.partition(".")[0] in sys.argv[1].split(","):
        del sys.modules[name]
for editor in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        importlib.import_module(f"edit_hooks.editors.{editor}")
        print(editor, *sys.modules, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def modules_after_import() -> dict[str, set[str]]:
    """Editor module -> names of the modules that an interpreter holds after importing it."""
    done = run_warm(["-c", CODE, ",".join(PACKAGES), *UNUSED], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name: set(modules) for name, *modules in map(str.split, done.stdout.splitlines())}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("editor", UNUSED)
def test_an_editor_loads_only_the_rooms_it_uses(editor, modules_after_import):
    loaded = modules_after_import[editor]
    assert f"edit_hooks.editors.{editor}" in loaded
    assert not loaded & {f"edit_hooks.{room}" for room in UNUSED[editor]}
    assert not loaded & set(PACKAGES)
    others = {name for name in loaded if name.startswith("edit_hooks.editors.")} - {f"edit_hooks.editors.{editor}"}
    assert not others
