"""The README is short, true and runs: its commands, its Python, its numbers; and the commands of pages behind it.

Commands for other people's models are run on a tiny model with small data; the demo commands run as they stand, but for
a smaller `--limit`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import blocks_measured
import front
import lm_eval.tasks.manager
import pytest
from lm_eval.__main__ import cli_evaluate
from lm_runs import SHORT
from paths import ROOT
from result_files import DATE, scripted_results, write_run

from edit_hooks.base.registry import CORE, EDITORS
from edit_hooks.contract.tiny_models import save_tiny
from lm_edit.cli.main import main

README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
BLOCKS = FENCED.findall(README)
# Pages whose commands run here as well; those of the others are parsed in test_documented_commands.py.
PAGES = ("docs/reference/edited-hf.md", "docs/guides/prepare.md")
FURTHER = [block for page in PAGES for block in FENCED.findall((ROOT / page).read_text(encoding="utf-8"))]
COMMANDS = [
    line.split("   #")[0].strip()
    for kind, text in [*BLOCKS, *FURTHER]
    if kind == "bash"
    for line in text.splitlines()
    if line.strip()
]
MAX_WORDS = 900
LM_EVAL = [command for command in COMMANDS if command.startswith("lm_eval ")]
LM_EDIT = [command for command in COMMANDS if command.startswith("lm-edit ")]
SCRIPTS = [command for command in COMMANDS if command.startswith("bash ")]


def run_command(words: list[str], cwd: Path, **environment: str) -> str:
    scrubbed = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{scrubbed.get('PATH', '')}"
    done = subprocess.run(
        words, cwd=cwd, env={**scrubbed, "PATH": path, **environment}, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_it_is_read_to_the_end():
    assert len(README.split()) <= MAX_WORDS
    tables = re.findall(r"(?:^\|.*\n)+", README, flags=re.MULTILINE)
    assert all(table.count("\n") - 2 <= 8 and table.splitlines()[0].count("|") == 4 for table in tables) and tables
    (example,) = [text for kind, text in BLOCKS if kind == "python"]
    assert example.count("\n") <= 10


def test_its_links_and_pictures_exist():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_its_numbers_are_those_of_the_kept_runs(monkeypatch):
    """The table, and the numbers beside the bars of both pictures."""
    assert front.is_current(), "run docs/_ext/front.py"
    assert "**More than 25 editors**" in README and len(EDITORS) > 25
    shown = {editor for editors in front.PANELS.values() for editor in editors}
    assert len(shown) == 8 and shown <= set(CORE)
    cells = blocks_measured.kept_cells()
    free = [cells[editor]["WILD EM"].value for editor in shown]
    assert f"hold in {min(free):.0%} to {max(free):.0%}".replace("%", "", 1).replace("%", " percent") in README
    of_table = cells[blocks_measured.OF_QUESTIONS]
    monkeypatch.setitem(of_table, "ES", dataclasses.replace(of_table["ES"], value=0.5))
    monkeypatch.setattr(blocks_measured, "kept_cells", lambda: cells)
    assert not front.is_current(), "another number in the kept runs makes the table stale"


def test_every_command_is_known():
    assert len(LM_EVAL) + len(LM_EDIT) + len(SCRIPTS) == len(COMMANDS)
    assert "lm_eval --model edited_hf --tasks bake_rq,qaedit_wild" in LM_EVAL
    assert [command.split()[1] for command in SCRIPTS] == ["scripts/quickstart.sh", "scripts/test.sh"]


def test_the_comparison_does_not_read_the_quickstart():
    """Its runs have another ``--limit``, so the leaderboard and the figure would refuse both together."""
    folders = set(re.findall(r"--output_path (\S+)", README))
    read = {shlex.split(command)[2 + (" figure " in command)] for command in LM_EDIT if " -o " in command}
    quickstart = (ROOT / "scripts/quickstart.sh").read_text(encoding="utf-8")
    (written,) = re.findall(r'^output="(.*?)"$', quickstart, flags=re.MULTILINE)
    assert folders == read and len(folders) == 1
    assert Path(written).parts[0] not in folders


@pytest.fixture
def no_built_in_tasks(tmp_path, monkeypatch):
    """An empty folder in the place of lm-eval's 14,000 task files, which take ten seconds to index."""
    (tmp_path / "built_in").mkdir()
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "built_in" / "manager.py"))


@pytest.mark.usefixtures("no_built_in_tasks")
@pytest.mark.parametrize("command", sorted(set(LM_EVAL)), ids=lambda command: command[27:70])
def test_lm_eval_commands_run(command, tmp_path, monkeypatch, capsys):
    """Run each command of the README through lm-eval's entry point, on a tiny model."""
    words = shlex.split(command)
    arguments = words.index("--model_args") + 1 if "--model_args" in words else None
    model_args = dict(part.split("=", 1) for part in words[arguments].split(",")) if arguments else {}
    model_args |= {"pretrained": str(save_tiny(tmp_path, "llama")), "data": "mini", "store": str(tmp_path / "store")}
    if arguments is None:
        words += ["--model_args", ""]
        arguments = len(words) - 1
    words[arguments] = ",".join(f"{key}={value}" for key, value in model_args.items())
    gen_kwargs = [] if "--gen_kwargs" in words else ["--gen_kwargs", ",".join(f"{k}={v}" for k, v in SHORT.items())]
    monkeypatch.setattr(sys, "argv", [*words, "--limit", "2", *gen_kwargs])
    cli_evaluate()
    output = capsys.readouterr().out
    assert "reverse_qa_prob" in output or "efficacy_prob" in output or "_syn" in output or "wild_em" in output


# Makes a command quick on a tiny model. A random one knows no fact, and may find no setting that works (exit code 1).
SMALL = {
    "trace": ["--answer", "predicted", "--num-edits", "2", "--data", "mini"],
    "stats": ["--tokens", "300"],
    "tune": ["--num-edits", "6", "--trials", "2", "--data", "mini"],
}


# Their inputs are files of other projects, which the tests of lm_edit/imports write and read.
OF_OTHERS = ("lm-edit import-easyedit", "lm-edit stats import")
OF_RESULTS = ("sweep", "results", "leaderboard", "figure")  # these read a plan or saved results


@pytest.mark.parametrize("command", sorted(command for command in set(LM_EDIT) if command.split()[1] in OF_RESULTS))
def test_commands_on_results_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, task in enumerate(("bake_es", "bake_rq", "qaedit_wild_reliability")):
        for editor in ("ft_m", "rome"):
            date = DATE.replace("2026", str(2026 + number))
            write_run(tmp_path / "runs", task, editor=editor, results=scripted_results(task), date=date)
    words = shlex.split(command)[1:]
    assert main(words) == 0
    assert (tmp_path / words[words.index("-o") + 1]).exists()
    assert len(capsys.readouterr().out.strip().split("\n")) >= 1


@pytest.mark.parametrize(
    "command",
    [one for one in sorted(set(LM_EDIT)) if one.split()[1] not in OF_RESULTS and not one.startswith(OF_OTHERS)],
)
def test_lm_edit_commands_run(command, tmp_path, monkeypatch, capsys):
    _, verb, *words = shlex.split(command)
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = ["--pretrained", str(save_tiny(tmp_path, "llama")), "--device", "cpu"]
    assert main([verb, *words, *model, *SMALL[verb]]) in ((0, 1) if verb == "tune" else (0,))
    assert len(capsys.readouterr().out.strip().split("\n")) >= 2


def test_python_example_runs(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    (example,) = [text for kind, text in BLOCKS if kind == "python"]
    monkeypatch.chdir(tmp_path)
    names = {"model": tiny_model("llama"), "tokenizer": tiny_tokenizer("byte_bpe_bos")}
    exec(compile(example, "README.md", "exec"), names)
    assert (tmp_path / "france.safetensors").exists()
