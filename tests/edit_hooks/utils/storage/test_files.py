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
from edit_hooks.utils.storage.files import (
    cache_root,
    packaged_file,
    parse_size,
    read_text,
    remove_leftovers,
    replacing,
    require_file,
    require_folder,
    sha256_of,
    user_path,
)


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


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with replacing(tmp_path / "made") as temporary:
        temporary.mkdir()
        (temporary / "a.json").write_text("a")
        assert not (tmp_path / "made").exists()
    with pytest.raises(RuntimeError), replacing(tmp_path / "failed") as temporary:
        temporary.mkdir()
        (temporary / "b.json").write_text("b")
        raise RuntimeError
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["made", "made/a.json"]


@pytest.mark.parametrize("write", ["temporary.write_text('half')", "temporary.mkdir(), (temporary / 'a').touch()"])
def test_leftovers_of_dead_processes_are_removed(write, tmp_path):
    code = (
        "import os, signal, pathlib, sys\n"
        "from edit_hooks.utils.storage.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as temporary:\n"
        f"    {write}\n"
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
    assert readers == ["edit_hooks/utils/storage/files.py", "lm_edit/cli/contract.py"]


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
    path = packaged_file("edit_hooks", "utils", "storage", "files.py")
    assert path is not None and path.samefile(ROOT / "edit_hooks" / "utils" / "storage" / "files.py")
    assert packaged_file("edit_hooks", "no.file") is packaged_file("no_package", "x") is packaged_file("json.x", "y")
    assert sha256_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9", r"not UTF-8 text \(byte 3\)"),
        ("a".encode("utf-16"), "not UTF-8"),
        (b"a\0b", "NUL bytes"),
        (b"\x1f\x8b\x08", "compressed \\(gzip\\)"),
        (b"PK\x03\x04", "compressed \\(zip\\)"),
    ],
)
def test_content_that_is_no_text_is_refused(tmp_path, content, message):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(EditingError, match=message):
        read_text(path, "list")


def test_texts_are_read_without_byte_order_mark_and_with_plain_line_ends(tmp_path):
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(tmp_path / "x") == "a\nb\nc\n"


def test_places_that_are_no_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "pipe", "a pipe or a device"),
        ("/dev/zero", "a pipe or a device"),
        (tmp_path, "it is a folder"),
        (tmp_path / "missing", "no such file"),
        ("a\0b", "NUL byte"),
        ("a" * 5000, "cannot be read"),
        (5, "cannot be read"),
    ]:
        with pytest.raises(EditingError, match=message):
            require_file(path)
    with pytest.raises(EditingError, match="NUL byte"):
        user_path("a\0", "data")


def test_folders_are_checked_and_not_made(tmp_path):
    (tmp_path / "file").write_text("x")
    assert require_folder(tmp_path / "new" / "deep", "store") == tmp_path / "new" / "deep"
    with pytest.raises(EditingError, match="is a file; name a folder"):
        require_folder(tmp_path / "file" / "x", "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
