"""Atomic writes, leftovers of killed processes, the cache folder, sizes, digests."""

import ast
import hashlib
import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root, packaged_file, parse_size, remove_leftovers, replacing, sha256_of


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.json"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "new" and [found.name for found in tmp_path.iterdir()] == ["file.json"]


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    code = (
        "import os, signal, pathlib, sys\n"
        "from edit_hooks.utils.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "dead.json")], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".others.0123456789ab-1-00000000.tmp").write_text("another machine's")
    (tmp_path / ".any.tmp").write_text("not ours")
    with replacing(tmp_path / "alive.json") as temporary:
        temporary.write_text("being written")
        assert remove_leftovers(tmp_path) == 1 and temporary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".any.tmp",
        ".others.0123456789ab-1-00000000.tmp",
        "alive.json",
    ]
    assert remove_leftovers(tmp_path / "nowhere") == 0


def test_the_cache_folder_is_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LM_EDIT_CACHE", "~/x")
    assert cache_root() == tmp_path / "x"
    monkeypatch.delenv("LM_EDIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_root() == tmp_path / "cache" / "lm-eval-editing"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / ".cache" / "lm-eval-editing"


def test_only_one_function_reads_the_cache_variables():
    readers = []
    for package in ("edit_hooks", "judges", "lm_eval_tasks", "lm_edit"):
        for path in sorted((ROOT / package).rglob("*.py")):
            constants = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            if any(node.value in ("LM_EDIT_CACHE", "XDG_CACHE_HOME") for node in constants):
                readers.append(path.relative_to(ROOT).as_posix())
    # The second sets the variable around the checks of an editor.
    assert readers == ["edit_hooks/utils/files.py", "lm_edit/cli/contract.py"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), ("5GB", 5_000_000_000), ("1.5 kb", 1500), ("2GiB", 2 * 1024**3), (" 3 MiB ", 3 * 1024**2), ("7b", 7)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "5GBs"])
def test_other_sizes_are_errors(text):
    with pytest.raises(EditingError, match="not readable"):
        parse_size(text)


def test_files_of_packages_and_their_digest():
    path = packaged_file("edit_hooks", "utils", "files.py")
    assert path is not None and path.samefile(ROOT / "edit_hooks" / "utils" / "files.py")
    assert packaged_file("edit_hooks", "no.file") is packaged_file("no_package", "x") is packaged_file("json.x", "y")
    assert sha256_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()
