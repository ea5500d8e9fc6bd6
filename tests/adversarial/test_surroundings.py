"""Systems without a home folder, UTF-8 or a writable disk, and line ends of Windows: a sentence, or no difference."""

from __future__ import annotations

import _pyio
import errno
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import pytest
from lm_eval.loggers import EvaluationTracker

import lm_eval_editing_autoload
from edit_hooks.store.layout import is_marked, mark
from edit_hooks.store.store import Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage import files
from edit_hooks.utils.storage.files import cache_root, write_atomically
from edit_hooks.utils.storage.pinned_file import UrlFile
from lm_edit.cli.command import say
from lm_edit.cli.main import VERBS, main
from lm_edit.sweeps.execution.runs import execute
from lm_eval_tasks.startup.evaluation import check_output

pwd = pytest.importorskip("pwd")  # POSIX only

lm_eval_editing_autoload.install()  # as the .pth file does in an installed environment


@pytest.mark.parametrize("chosen", [None, "~/cache", "~no-such-user/cache"])
def test_a_user_without_a_home_folder(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in containers that run under any user id."""

    def unknown(_user: object) -> None:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "LM_EDIT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv("LM_EDIT_CACHE", chosen)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert main(["cache"]) == 2
    assert "has no home directory" in (message := capsys.readouterr().err) and "Set LM_EDIT_CACHE" in message
    monkeypatch.setenv("LM_EDIT_CACHE", "/cache")
    assert cache_root() == Path("/cache")


@pytest.mark.parametrize(
    ("encoding", "errors"), [("ascii", "strict"), ("ascii", "surrogateescape"), ("cp1252", "strict")]
)
def test_output_in_an_encoding_without_the_character(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in pipes on Windows, and with LC_ALL=C where Python may not choose UTF-8."""
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setitem(VERBS, "demo", VERBS["demo"]._replace(run=lambda args: say("0.5 ± 東京") or 0))
    assert main(["demo"]) == 0
    plus_minus = "\\xb1" if encoding == "ascii" else "±"
    assert output.buffer.getvalue().decode(encoding) == f"0.5 {plus_minus} \\u6771\\u4eac{os.linesep}"


def test_line_ends_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are compared by their bytes, such as the marker of a store, which was written again at every write."""
    monkeypatch.setattr(io, "open", _pyio.open)  # its line end is that of os
    monkeypatch.setattr(os, "linesep", "\r\n")
    (tmp_path / "as_text").write_text("a\n", encoding="utf-8")
    assert (tmp_path / "as_text").read_bytes() == b"a\r\n"  # the pretense works
    write_atomically(tmp_path / "file", "a\nb\n")
    mark(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"a\nb\n" and is_marked(tmp_path)


@pytest.mark.parametrize("place", ["file", "file/inside", "file/results.json"])
def test_an_output_path_that_cannot_be_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval loses the results of the whole run, with a warning and exit code 0."""
    (tmp_path / "file").touch()
    tracker = EvaluationTracker(output_path=str(tmp_path / place))
    options: dict[str, Any] = {"model": "edited_hf", "model_args": "editor=rom", "tasks": ["arc_easy"]}
    with pytest.raises(EditingError, match=r"the output .* is not a folder|of the output: Not a dir"):
        lm_eval.simple_evaluate(**options, evaluation_tracker=tracker)
    monkeypatch.setenv("RANK", "1")  # the first process saves, and the disk of another machine need not be there
    with pytest.raises(EditingError, match="unknown editor 'rom'"):
        lm_eval.simple_evaluate(**options, evaluation_tracker=tracker)


@pytest.mark.parametrize("place", ["results", "new/results", "new/results.json", ""])
def test_an_output_path_that_can_be_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (place, "results.json", str(tmp_path / place)):
        check_output(SimpleNamespace(output_path=path))
    assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As network file systems whose server has no lock service: no wait without end, and no traceback."""

    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_lock)
    files._warn_unwritable.cache_clear()
    with Store(tmp_path).lock("stream"):
        assert "No locks available" in caplog.text  # the processes of a run then make the same edits, each for itself
    with pytest.raises(EditingError, match=r"no locks that work \(No locks available\).*another --out"):
        execute(str(tmp_path), {})


def test_a_cache_that_cannot_be_written_keeps_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(EditingError, match=r"towns\.json cannot be kept in .*name another folder in .* LM_EDIT_CACHE"):
        UrlFile(url="http://127.0.0.1:9/towns.json", sha256="0" * 64).fetch()
