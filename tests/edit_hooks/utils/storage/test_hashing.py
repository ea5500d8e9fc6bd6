"""Keys of JSON-able values, and the fingerprint of the code behind a result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from package_copy import PACKAGES
from paths import ROOT

from edit_hooks.utils.storage import hashing
from edit_hooks.utils.storage.hashing import key_of

# A new statement, a new comment, and a longer module docstring.
STATEMENT, COMMENT, DOCSTRING = "\nADDED = 1\n", "\n# added\n", '"""Added.'


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the packages, to be changed."""
    for package in ("edit_hooks", "lm_edit"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "configs"))
    return tmp_path


def python(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process with a folder on its path."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, timeout=60
    )


def fingerprint(root: Path, *modules: str) -> str:
    """Code fingerprint as a new process computes it."""
    call = f"from edit_hooks.utils.storage.hashing import code_fingerprint; print(code_fingerprint(*{modules!r}))"
    done = python(root, call)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def unchanged() -> str:
    """The fingerprint of an editor as it is; the folder is no part of it."""
    return fingerprint(ROOT, "edit_hooks.editors.rome")


def change(path: Path, addition: str) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"""', addition, 1) if addition == DOCSTRING else text + addition, encoding="utf-8")


def test_equal_values_have_equal_keys() -> None:
    assert key_of({"a": 1, "b": [1.5, None]}) == key_of({"b": [1.5, None], "a": 1})
    assert key_of([1]) != key_of(["1"]) and len(key_of("é")) == 64


IGNORED = [
    ("lm_edit/cli/main.py", STATEMENT),
    ("lm_edit/cli/main.py", COMMENT),
    ("edit_hooks/utils/errors.py", STATEMENT),
    ("edit_hooks/base/registry.py", STATEMENT),
    ("edit_hooks/editors/grace.py", STATEMENT),
    ("edit_hooks/lm/model.py", STATEMENT),
    ("edit_hooks/editors/rome.py", COMMENT),
    ("edit_hooks/editors/rome.py", DOCSTRING),
    ("edit_hooks/locate/moments/solve.py", DOCSTRING),
]


def test_the_fingerprint_of_an_editor_ignores_what_computes_nothing_of_it(clone: Path, unchanged: str) -> None:
    """All at once: each fingerprint reads 200 files in a new process."""
    for file, addition in IGNORED:
        change(clone / file, addition)
    assert fingerprint(clone, "edit_hooks.editors.rome") == unchanged


@pytest.mark.parametrize("file", ["editors/rome.py", "locate/moments/solve.py", "base/editor.py", "utils/batching.py"])
def test_the_fingerprint_of_an_editor_covers(clone: Path, file: str, unchanged: str) -> None:
    change(clone / "edit_hooks" / file, STATEMENT)
    assert fingerprint(clone, "edit_hooks.editors.rome") != unchanged


IMPORTS = {
    "function": "def compute():\n    from {module} import answer\n    return answer\n",
    "plain": "import {module}\n",
    "relative": "from . import helper\n",
    "conditional": "import sys\nif sys:\n    from {module} import answer\n",
}


@pytest.mark.parametrize("style", IMPORTS)
def test_imports_of_an_editor_outside_this_package_count(clone: Path, style: str) -> None:
    package = clone / "user" / "some_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("answer = 41\n")
    (package / "unrelated.py").write_text("answer = 41\n")
    (package / "editor.py").write_text(IMPORTS[style].format(module="some_package.helper"))
    (clone / "some_package").symlink_to(package)
    before = fingerprint(clone, "some_package.editor")
    change(package / "unrelated.py", STATEMENT)
    assert fingerprint(clone, "some_package.editor") == before
    change(package / "helper.py", STATEMENT)
    assert fingerprint(clone, "some_package.editor") != before


def test_helpers_beside_a_single_file_editor_count(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("editors")
    (folder / "my_editor.py").write_text("def compute():\n    import my_helper\n    import json\n")
    (folder / "my_helper.py").write_text("raise RuntimeError('hashing imports nothing')\n")
    call = "import sys; sys.path.append({!r}); from edit_hooks.utils.storage.hashing import code_fingerprint; print({})"
    code = call.format(str(folder), "code_fingerprint('my_editor'), 'my_helper' in sys.modules")
    before, loaded = python(clone, code).stdout.split()
    assert loaded == "False"
    change(folder / "my_helper.py", STATEMENT)
    assert python(clone, code).stdout.split()[0] != before


CLOSURE = "from edit_hooks.utils.storage.hashing import _closure; print(*sorted(_closure({modules!r})))"


def test_helpers_beside_an_editor_in_the_root_of_a_clone_count(clone: Path) -> None:
    """The packages of the clone lie in the same folder and are no helpers."""
    (clone / "my_editor.py").write_text("import my_helper\nfrom lm_edit import stats\n")
    (clone / "my_helper.py").write_text("answer = 41\n")
    names = python(clone, CLOSURE.format(modules=("my_editor",))).stdout.split()
    assert names == ["my_editor", "my_helper"]
    before = fingerprint(clone, "my_editor")
    change(clone / "my_helper.py", STATEMENT)
    assert fingerprint(clone, "my_editor") != before


def test_a_module_of_this_distribution_does_not_bring_the_packages_beside_it(clone: Path) -> None:
    assert set(PACKAGES) == hashing._OWN_PACKAGES
    (clone / "lm_eval_tasks" / "common").mkdir(parents=True)
    for name in ("__init__.py", "common/__init__.py", "common/cases.py"):
        (clone / "lm_eval_tasks" / name).touch()
    names = python(clone, CLOSURE.format(modules=("lm_edit.tuning.trials",))).stdout.split()
    assert {name.partition(".")[0] for name in names} == {"edit_hooks", "lm_edit"}


def test_an_editor_without_a_source_file_is_refused(clone: Path) -> None:
    done = python(clone, "from edit_hooks.utils.storage.hashing import code_fingerprint; code_fingerprint('__main__')")
    assert "EditingError: module '__main__' has no source file" in done.stderr
    (clone / "script.py").write_text(
        "from edit_hooks.utils.storage.hashing import code_fingerprint\nprint(len(code_fingerprint('__main__')))\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=clone, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "64", done.stderr
