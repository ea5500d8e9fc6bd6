"""Editors by name, by class, and from other packages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributions import write_metadata

from edit_hooks import EditingError, load_editor
from edit_hooks.base import registry
from edit_hooks.base.describe import describe_editors
from edit_hooks.base.registry import EDITORS, ENTRY_POINTS, editor_class, editor_names
from lm_edit.cli.main import main

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with an editor's module, as if no other editor had been looked up before."""
    (tmp_path / "my_editor.py").write_text(EDITOR)
    (tmp_path / "my_broken.py").write_text("x = 1\ny = x.missing\n")
    (tmp_path / "my_needy.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_editor", "my_broken", "my_needy"):  # other tests of this process have modules of these names, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    registry._registered.cache_clear()
    yield tmp_path
    registry._registered.cache_clear()
    for name in ("my_editor", "my_broken", "my_needy"):
        sys.modules.pop(name, None)


def install(folder: Path, package: str, **editors: str) -> None:
    """Make a folder on the path look like an installed package that registers editors."""
    write_metadata(folder, package, {ENTRY_POINTS: editors})


UNUSABLE = {
    "my_editor:something": "my_editor:something is not a subclass of edit_hooks.Editor",
    "my_editor:Nameless": "the class my_editor:Nameless does not set name and config_class",
    "my_editor:Absent": "module my_editor has no 'Absent'. It defines: Config, Noop, Nameless",
    "my_editor:": "package.module:Class",
    ":Noop": "package.module:Class",
    "absent_module:Noop": "there is no module 'absent_module'; install its package or add its folder",
    "editors/my_editor.py:Noop": "editors/my_editor.py is a file, and the name of a module is needed: my_editor:Noop",
    "./my_editor:Noop": "./my_editor is a file, and the name of a module is needed: my_editor:Noop",
    "my_editor.deeper:Noop": "there is no module 'my_editor.deeper'",
    "my_needy:Noop": "ModuleNotFoundError: No module named 'a_package_that_is_absent'",
    "my_broken:Noop": "cannot be imported: AttributeError: 'int' object has no attribute 'missing'",
}


@pytest.mark.parametrize("path", UNUSABLE)
def test_a_path_that_names_no_editor_is_an_error(folder: Path, path: str) -> None:
    with pytest.raises(EditingError) as error:
        load_editor(path)
    assert str(error.value).startswith("editor ") and UNUSABLE[path] in str(error.value)
    assert ("my_broken.py, line 2" in str(error.value)) == (path == "my_broken:Noop")


def test_an_editor_is_loaded_by_the_path_of_its_class(folder: Path) -> None:
    assert load_editor("my_editor:Noop").source_modules == ("my_editor",)


def test_a_class_in_the_working_folder_needs_no_installation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed commands do not have the folder in their import path; what is installed comes first."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "editor_at_work.py").write_text(EDITOR)
    (tmp_path / "work" / "my_editor.py").write_text("raise RuntimeError('the file of the working folder')")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pytest.raises(EditingError, match="there is no module 'editor_at_work'"):
        load_editor("editor_at_work:Noop")
    monkeypatch.chdir(tmp_path / "work")
    for name in ("editor_at_work", "editor_at_work.py"):
        with pytest.raises(EditingError, match="is a file here; give its class, too, as in editor_at_work:ClassName"):
            load_editor(name)
    assert load_editor("editor_at_work:Noop").name == "noop"
    assert load_editor("my_editor:Noop").name == "noop" and sys.path[-1] == str(tmp_path / "work")
    sys.modules.pop("editor_at_work")


def test_an_installed_package_registers_editors(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    install(folder, "plugin", broken="my_broken:Noop", noop="my_editor:Noop")
    assert load_editor("noop").name == "noop" and editor_names()[-2:] == ["broken", "noop"]
    with caplog.at_level(logging.WARNING):
        rows = describe_editors()
    assert [row.name for row in rows][-2:] == [[*EDITORS][-1], "noop"] and rows[-1].summary == "Change nothing."
    assert "my_broken.py, line 2" in caplog.text  # left out of the table with a warning
    with pytest.raises(EditingError, match="Did you mean 'noop'"):
        load_editor("nop")
    with pytest.raises(EditingError, match="cannot be imported: AttributeError"):
        load_editor("broken")
    assert main(["editors"]) == 0
    printed = capsys.readouterr().out
    assert "Change nothing." in printed and "not stated" in printed and "with new keys" in printed


@pytest.mark.parametrize("name", EDITORS)
def test_every_editor_states_what_a_stream_carries(name: str) -> None:
    """A class that changes what is carried states it again; the contract compares it with a stream."""
    for cls in editor_class(name).__mro__:
        changes = {"condensed", "most_state_bytes"} & vars(cls).keys()
        if cls.__name__ not in ("Editor", "EditorOnBase") and changes:
            assert "stream_growth" in vars(cls), (cls, changes)
    growth = editor_class(name).stream_growth
    assert growth is not None and growth.carries and growth.grows


def test_two_packages_with_one_name_are_an_error(folder: Path) -> None:
    install(folder, "plugin", noop="my_editor:Noop")
    install(folder, "another", noop="my_editor:Nameless")
    with pytest.raises(EditingError, match="two installed packages register 'noop'") as error:
        load_editor("noop")
    for words in ("Uninstall one of them", "my_editor:Noop of plugin", "my_editor:Nameless of another"):
        assert words in str(error.value)
    assert editor_class("rome").__name__ == "ROME"


def test_a_package_cannot_replace_a_built_in_editor(folder: Path) -> None:
    install(folder, "plugin", rome="my_editor:Noop")
    assert editor_class("rome").__module__ == "edit_hooks.editors.rome"
    with pytest.raises(EditingError, match="my_editor:Noop as editor 'rome'"):
        editor_names()


def test_unknown_names_are_errors_with_near_misses() -> None:
    with pytest.raises(EditingError, match=r"unknown editor 'rom'\. Did you mean 'rome'.*or package\.module:Class"):
        editor_class("rom")


@pytest.mark.parametrize("name", EDITORS)
def test_a_built_in_editor_has_the_name_of_its_row_and_file(name: str) -> None:
    editor = editor_class(name)
    assert editor.name == name and EDITORS[name] == (f"{editor.__module__}:{editor.__qualname__}", editor.writes)
    assert editor_names()[: len(EDITORS)] == list(EDITORS)
