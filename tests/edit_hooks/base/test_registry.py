"""Editors by name, by class, and from other packages, each in a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from edit_hooks import EditingError
from edit_hooks.base.registry import EDITORS, ENTRY_POINTS, editor_class, editor_names

EDITOR = '''
from edit_hooks import Editor, EditorConfig

class Config(EditorConfig):
    pass

class Noop(Editor[Config]):
    """Change nothing."""

    name = "noop"
    config_class = Config

    def compute(self, job):
        return []

class Nameless(Editor[Config]):
    pass

something = 3
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder on the path with an editor's module."""
    (tmp_path / "my_editor.py").write_text(EDITOR)
    (tmp_path / "my_broken.py").write_text("x = 1\ny = x.missing\n")
    (tmp_path / "my_needy.py").write_text("import a_package_that_is_absent\n")
    return tmp_path


def install(folder: Path, package: str, **editors: str) -> None:
    """Make a folder on the path look like an installed package that registers editors."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"[{ENTRY_POINTS}]", *(f"{name} = {value}" for name, value in editors.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def evaluate(folder: Path, *expressions: str) -> tuple[list[str], str]:
    """Evaluate expressions in a new interpreter with the folder on its path.

    Returns:
        The value of each as text, or the text of its `EditingError`; and the log.
    """
    code = (
        "from edit_hooks.base.describe import describe_editors\n"
        "from edit_hooks.base.registry import editor_class, editor_names, load_editor\n"
        "from edit_hooks.utils.errors import EditingError\n"
    )
    for expression in expressions:
        code += f"try:\n    print({expression})\nexcept EditingError as error:\n    print('EditingError:', error)\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(expressions)
    return lines, done.stderr


UNUSABLE = {
    "my_editor:something": "my_editor:something is not a subclass of edit_hooks.Editor",
    "my_editor:Nameless": "the class my_editor:Nameless does not set name and config_class",
    "my_editor:Absent": "module my_editor has no 'Absent'",
    "my_editor:": "package.module:Class",
    ":Noop": "package.module:Class",
    "absent_module:Noop": "there is no module 'absent_module'; install its package or add its folder",
    "my_editor.deeper:Noop": "there is no module 'my_editor.deeper'",
    "my_needy:Noop": "ModuleNotFoundError: No module named 'a_package_that_is_absent'",
    "my_broken:Noop": "cannot be imported: AttributeError: 'int' object has no attribute 'missing'",
}


def test_an_editor_is_loaded_by_the_path_of_its_class(folder: Path) -> None:
    calls = [f"load_editor({path!r})" for path in UNUSABLE]
    (modules, *errors), _ = evaluate(folder, "load_editor('my_editor:Noop').source_modules", *calls)
    assert modules == "('my_editor',)"
    for error, message in zip(errors, UNUSABLE.values(), strict=True):
        assert error.startswith("EditingError: editor ") and message in error
    assert "my_broken.py, line 2" in errors[-1]


def test_an_installed_package_registers_editors(folder: Path) -> None:
    install(folder, "plugin", broken="my_broken:Noop", noop="my_editor:Noop")
    (name, names, row, rows, unknown, broken), log = evaluate(
        folder,
        "load_editor('noop').name",
        "editor_names()[-2:]",
        "describe_editors()[-1].summary",
        "[row.name for row in describe_editors()][-2:]",
        "load_editor('nop')",
        "load_editor('broken')",
    )
    assert name == "noop" and names == "['broken', 'noop']" and row == "Change nothing."
    assert rows == "['mend', 'noop']" and "my_broken.py, line 2" in log  # left out of the table with a warning
    assert "Did you mean 'noop'" in unknown and "cannot be imported: AttributeError" in broken


def test_two_packages_with_one_name_are_an_error(folder: Path) -> None:
    install(folder, "plugin", noop="my_editor:Noop")
    install(folder, "another", noop="my_editor:Nameless")
    (error, built_in), _ = evaluate(folder, "load_editor('noop')", "editor_class('rome')")
    assert "two installed packages register 'noop'" in error and "Uninstall one of them" in error
    assert "my_editor:Noop of plugin" in error and "my_editor:Nameless of another" in error
    assert "ROME" in built_in


def test_a_package_cannot_replace_a_built_in_editor(folder: Path) -> None:
    install(folder, "plugin", rome="my_editor:Noop")
    (rome, names), _ = evaluate(folder, "editor_class('rome')", "editor_names()")
    assert "edit_hooks.editors.rome.ROME" in rome and "my_editor:Noop as editor 'rome'" in names


def test_the_command_lists_editors_of_other_packages(folder: Path) -> None:
    install(folder, "plugin", noop="my_editor:Noop")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    command = [sys.executable, "-m", "lm_edit.cli.main", "editors"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Change nothing." in done.stdout, done.stderr


def test_unknown_names_are_errors_with_near_misses() -> None:
    with pytest.raises(EditingError, match=r"unknown editor 'rom'\. Did you mean 'rome'.*or package\.module:Class"):
        editor_class("rom")


@pytest.mark.parametrize("name", EDITORS)
def test_a_built_in_editor_has_the_name_of_its_row_and_file(name: str) -> None:
    editor = editor_class(name)
    assert editor.name == name and EDITORS[name] == f"{editor.__module__}:{editor.__qualname__}"
    assert editor_names()[: len(EDITORS)] == list(EDITORS)
