"""The commands of the guides, in order and in one folder, on a tiny model.

Plans of a sweep take hours and are only parsed (`test_documented_commands.py`).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import lm_eval.tasks.manager
import pytest
import yaml
from lm_eval.__main__ import cli_evaluate
from lm_runs import SHORT
from paths import ROOT

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import save_tiny
from lm_edit.cli.main import main

PAGES = ("compare-editors", "own-editor", "facts-into-a-model", "own-facts")
GUIDES = "\n".join((ROOT / f"docs/guides/{page}.md").read_text(encoding="utf-8") for page in PAGES)
ROUTES = dict(re.findall(r"^##? (.*?)\n(.*?)(?=^##? |\Z)", GUIDES, flags=re.DOTALL | re.MULTILINE))


def blocks(route: str, language: str) -> list[str]:
    """The fenced blocks of a route, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", ROUTES[route], flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def commands(route: str) -> list[list[str]]:
    """The words of every command of a route, files of a pattern not yet filled in."""
    lines = [line.split(" #")[0].strip() for block in blocks(route, "bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A working folder, and an empty one in the place of lm-eval's task files, which take ten seconds to index."""
    (tmp_path / "built_in").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "built_in" / "manager.py"))
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # as in installed commands
    yield tmp_path / "work"
    sys.modules.pop("my_editor", None)


def test_the_context_of_the_guide_has_a_line_break() -> None:
    """In quotes of a shell, JSON's escape has one backslash; with two the model reads a backslash and an n."""
    given = [words[-1] for route in ROUTES for words in commands(route) if "--metadata" in words]
    contexts = [settings["wild_context"] for settings in map(json.loads, given) if "wild_context" in settings]
    assert contexts and all("\n" in context and "\\" not in context for context in contexts)


def execute(words: list[str], model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command of the guide in this process, on the model, with few steps and short answers."""
    program, *rest = words
    if program == "cp":
        shutil.copy(ROOT / rest[0], folder / rest[1])
        return
    rest = [str(path) for word in rest for path in (sorted(folder.glob(word)) if "*" in word else [word])]
    if program == "lm-edit":
        needs_model = rest[0] in ("edit", "export")
        options = ["--pretrained", model, "--device", "cpu"] if needs_model else []
        options += ["--editor-args", "num_steps:2"] if rest[0] == "edit" else []
        assert main([*rest, *options]) == 0, words
        return
    assert program == "lm_eval", words
    place = rest.index("--model_args") + 1
    given = dict(part.split("=", 1) for part in rest[place].split(","))
    if "editor" in given:
        given["editor_args"] = "num_steps:2"
    given = {"data": "mini", **given, "pretrained": model}
    rest[place] = ",".join(f"{name}={value}" for name, value in given.items())
    if "--limit" in rest:
        rest[rest.index("--limit") + 1] = "2"
    short = ",".join(f"{name}={value}" for name, value in SHORT.items())
    monkeypatch.setattr(sys, "argv", ["lm_eval", *rest, "--gen_kwargs", short])
    cli_evaluate()


def test_facts_are_put_into_a_model(folder, tmp_path, monkeypatch, capsys):
    (facts,) = blocks("Put facts into a model", "json")
    (folder / "facts.jsonl").write_text(facts, encoding="utf-8")
    model = str(save_tiny(tmp_path, "llama"))
    done = commands("Put facts into a model")
    assert done.pop()[-3:] == ["general_ability", "--limit", "100"]  # downloads the data of other tasks
    for words in done:
        execute(words, model, folder, monkeypatch)
    printed = capsys.readouterr().out
    assert "2 good, 0 bad" in printed and "2 edits written to edits, 0 failed" in printed
    assert (folder / "adapter/adapter_model.safetensors").is_file()
    table = printed.split("counterfact_flat_es", 1)[1]  # of the last command
    assert "efficacy_prob" in table and "efficacy_wild_em" in table and "2 made, 0 failed" in table


def test_own_facts_are_checked_edited_and_evaluated(folder, tmp_path, monkeypatch, capsys):
    smallest, event, several = blocks("Your own facts", "json")
    (folder / "facts.jsonl").write_text(smallest + event + several, encoding="utf-8")
    model = str(save_tiny(tmp_path, "llama"))
    for words in commands("Your own facts"):
        execute(words, model, folder, monkeypatch)
    printed = capsys.readouterr().out
    assert "3 good, 0 bad" in printed and "3 edits written to edits, 0 failed" in printed
    table = printed.split("counterfact_flat_es", 1)[1]
    assert "2 of 3 cases unscored: the record has no old answer to compare with (2)" in table
    assert "1 of 3 cases unscored: the record has no rephrased questions (1)" in table


def test_facts_in_chinese_and_about_code_are_edited_and_evaluated(folder, tmp_path, monkeypatch, capsys):
    route = "Facts in other languages, and code"
    chinese, code = blocks(route, "json")
    (folder / "facts.jsonl").write_text(chinese + code, encoding="utf-8")
    model = str(save_tiny(tmp_path, "llama"))
    for words in commands(route):
        execute(words, model, folder, monkeypatch)
    printed = capsys.readouterr().out
    assert "4 good, 0 bad" in printed and "4 edits written to edits, 0 failed" in printed
    assert "separators={'': 3, ' ': 1}" in printed and "outer_white_space=1" in printed
    index = json.loads((folder / "edits/edits.json").read_text(encoding="utf-8"))
    requests = [EditRequest.from_dict(edit["requests"][0]) for edit in index["edits"]]
    assert [request.text + request.continuation for request in requests] == [
        "奥斯马克的首都是塔尔斯克",
        "def volume(a):\n    # qulib 3.1\n    return qulib.cube(a)",
        "To open a window with qulib, call qulib.show_pane",
        "In Python, the value x = {} is a set",
    ]
    assert "4 made, 0 failed" in printed.split("counterfact_flat_es", 1)[1]
    assert "the instruction of wild_context" not in printed  # asked in a context in the language of the facts


def test_an_own_editor_is_checked_evaluated_and_compared(folder, tmp_path, monkeypatch, capsys):
    model = str(save_tiny(tmp_path, "llama"))
    for words in commands("Try an editor of your own"):
        capsys.readouterr()
        execute(words, model, folder, monkeypatch)
    shown = capsys.readouterr().out  # of `lm-edit results show`
    assert "my_editor" in shown and "r_rome" in shown and "reverse_qa_prob" in shown


def test_the_plan_can_be_run(folder, capsys):
    (text,) = blocks("Compare editors", "yaml")
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    dry_run = next(words for words in commands("Compare editors") if words[-1] == "--dry-run")
    assert main(dry_run[1:]) == 0
    printed = capsys.readouterr().out
    assert all(editor in printed for editor in yaml.safe_load(text)["editors"])
