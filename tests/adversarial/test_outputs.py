"""Commands never overwrite their inputs or other files, and check their outputs before the work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edit_hooks.assets import demo_model
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.outputs import check_output_file, check_output_folder
from lm_edit.cli.main import main

ROW = '{"question": "q", "gold": "g", "answer": "g"}\n'

# verb -> arguments; ``{input}`` is the file that the verb reads
FILES = {
    "judge": ["judge", "{input}", "--judge", "em", "--out"],
    "build-qaedit": ["build-qaedit", "x.csv", "N={input}", "--locality", "z.json", "--writer", "hf:x", "--out"],
    "trace": ["trace", "--edits", "{input}", "--out"],
    "plot": ["trace", "--edits", "{input}", "--plot"],
    "tune": ["tune", "--edits", "{input}", "--editor", "r_rome", "--lr", "0.1", "--out"],
    "tune settings": ["tune", "--edits", "mini", "--editor", "r_rome", "--editor-args", "{input}", "--out"],
}
FOLDERS = {
    "edit": ["edit", "--editor", "r_rome", "--edits", "{input}", "--out"],
    "export": ["export", "{input}", "--format", "peft", "--out"],
    "train mend": ["train", "mend", "--edits", "{input}", "--out"],
    "train serac": ["train", "serac", "--edits", "{input}", "--out"],
    "import": ["import", "mend", "--weights", "{input}", "--out"],
    "stats": ["stats", "--layers", "1", "--folder"],
}
Run = Callable[..., str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "input.jsonl"
    path.write_text(ROW)
    return path


@pytest.fixture
def refused(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a verb that must fail before it loads a model; return its message."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model is loaded before the output is checked")

    monkeypatch.setattr(EditedHFLM, "__init__", load)
    monkeypatch.setattr(demo_model, "demo_model_path", load)

    def run(arguments: list[str], out: object, *more: str) -> str:
        assert main([*(text.format(input=source) for text in arguments), str(out), *more]) == 2
        assert source.read_text() == ROW
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("verb", FILES)
@pytest.mark.parametrize("way", ["same", "dots", "hard link", "link"])
def test_an_input_is_not_overwritten(verb: str, way: str, source: Path, refused: Run, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    if way == "hard link":
        os.link(source, link)
    elif way == "link":
        link.symlink_to(source)
    out = {"same": source, "dots": tmp_path / "x" / ".." / source.name}.get(way, link)
    (tmp_path / "x").mkdir()
    message = refused(FILES[verb], out, "--overwrite")
    assert "is a file of the input" in message and str(source) in message


@pytest.mark.parametrize("verb", FILES)
def test_outputs_are_checked_before_the_work(verb: str, refused: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "old.svg").write_text("kept")
    for out, words in (
        (tmp_path / "folder", "is a folder"),
        (f"{tmp_path}/new/", "is a folder"),
        (tmp_path / "old.svg", "exists; name another file, or replace it with --overwrite"),
        (tmp_path / "old.svg" / "below", "not a folder"),
        ("/proc/none/out.svg", "cannot write"),
        (os.devnull, "not a regular file"),
    ):
        assert words in refused(FILES[verb], out), out
    assert (tmp_path / "old.svg").read_text() == "kept" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", FOLDERS)
def test_output_folders_are_checked_before_the_work(verb: str, source: Path, refused: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text("kept")
    cases = [(source, "not a folder"), (source / "below", "cannot write"), ("/proc/none/out", "cannot write")]
    if verb != "stats":  # adds files of its own names to a folder
        cases.append((tmp_path / "full", "exists and is not empty"))
    for out, words in cases:
        assert words in refused(FOLDERS[verb], out), out
    assert (tmp_path / "full" / "manifest.json").read_text() == "kept"


def test_two_outputs_of_a_command_differ(refused: Run, source: Path, tmp_path: Path) -> None:
    message = refused([*FILES["trace"], str(tmp_path / "a.svg"), "--plot"], tmp_path / "x" / ".." / "a.svg")
    assert "another output" in message


def test_samples_in_a_folder_are_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = tmp_path / "out" / "samples_task_2026-01-01T00-00-00.jsonl"
    samples.parent.mkdir()
    samples.write_text(ROW)
    command = ["judge", str(tmp_path), "--judge", "em", "--overwrite", "--out"]
    assert main([*command, str(samples)]) == 2 and samples.read_text() == ROW
    verdicts = tmp_path / "out" / "verdicts.jsonl"
    for _ in range(2):
        assert main([*command, str(verdicts)]) == 0 and verdicts.read_text().count("\n") == 1
    assert "is a file of the input" in capsys.readouterr().err


def test_a_home_folder_is_expanded_and_new_folders_are_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["judge", str(source), "--judge", "em", "--out=~/new/verdicts.jsonl"]) == 0
    assert (tmp_path / "home" / "new" / "verdicts.jsonl").read_text().count("\n") == 1
    assert check_output_folder("~/new folder") == tmp_path / "home" / "new folder"
    assert check_output_file(tmp_path / "x", inputs=["~no such user/y", "a\0b", "x" * 5000]).name == "x"
    with pytest.raises(EditingError, match="home directory"):
        check_output_file("~no such user/x")


def test_a_data_folder_protects_its_files(tmp_path: Path, refused: Run) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    inside = tmp_path / "data" / "deep" / "records.json"
    inside.write_text("[]")
    arguments = ["trace", "--edits", "bake", "--data", str(tmp_path / "data"), "--overwrite", "--out"]
    assert "is a file of the input" in refused(arguments, inside) and inside.read_text() == "[]"


def test_a_disk_that_fills_up_is_a_sentence(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("edit_hooks.utils.storage.files.write_atomically", write)
    assert main(["judge", str(source), "--judge", "em", "--out", str(tmp_path / "verdicts.jsonl")]) == 2
    assert "No space left on device" in capsys.readouterr().err
