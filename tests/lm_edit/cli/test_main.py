"""The command ``lm-edit``: its help, imports and exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
from paths import ROOT

from lm_edit.cli.main import VERBS, build_parser, main

HEAVY_PACKAGES = {"torch", "transformers", "lm_eval", "numpy", "yaml", "safetensors"}


def test_help_lists_every_verb_and_imports_no_heavy_package():
    code = (
        "import sys, lm_edit.cli.main as cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print(sorted({HEAVY_PACKAGES!r} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    *help_lines, imported = process.stdout.strip().split("\n")
    assert imported == "[]", process.stdout + process.stderr
    assert set(VERBS) <= {line.split()[0] for line in help_lines if line.strip()}


def test_help_begins_with_the_core_verbs(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    core, more = capsys.readouterr().out.partition("core verbs:")[2].split("\n\nmore:\n")
    assert [line.split()[0] for line in core.strip().splitlines()] == [n for n, verb in VERBS.items() if verb.is_core]
    assert {"edit", "tune", "sweep", "results", "leaderboard", "figure", "judge"} <= set(core.split())
    assert "cache" in more.split() and "cache" not in core.split()


def test_the_versions_are_those_of_the_installed_packages(capsys, monkeypatch):
    monkeypatch.setattr("lm_edit.cli.main.SHOWN_VERSIONS", ("pytest", "no-such-package"))
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    first, second, third = capsys.readouterr().out.splitlines()
    assert (ended.value.code, first, second) == (0, f"pytest {pytest.__version__}", "no-such-package is not installed")
    assert third.startswith(f"Python {sys.version.split()[0]} on ")


@pytest.mark.parametrize("arguments", [["sweep", "--list"], ["--help"]])
def test_a_closed_pipe_ends_quietly(arguments):
    """As with ``lm-edit sweep --list | head -1``, once head is gone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}  # argparse ignores write errors
    command = [sys.executable, "-m", "lm_edit.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (1, "")


def test_an_interrupt_ends_with_its_own_code(monkeypatch, capsys):
    def interrupt(_args):
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "demo", VERBS["demo"]._replace(run=interrupt))
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "lm-edit demo: interrupted\n"


@pytest.mark.parametrize(
    "line, verb, hint",
    [
        ("editr", "lm-edit", "'edit'"),
        ("results shw", "lm-edit results", "'show'"),
        ("export --format mergd -o x y", "lm-edit export", "'merged'"),
        (
            "results show runs --metric a",
            "lm-edit results show",
            "unrecognized arguments: --metric a. Did you mean '--metrics'",
        ),
        ("edit --mode joint --editor ft_m --edits x -o y", "lm-edit edit", "unrecognized arguments: --mode joint"),
        ("tune --limit 4 --editor ft_m --edits x -o y", "lm-edit tune", "--limit 4. Did you mean '--num-edits'"),
    ],
)
def test_a_misspelled_word_is_refused_with_what_was_meant(line, verb, hint, capsys):
    """A shortened option is refused, too: `--mode joint` would be `--model-args joint`."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    message = capsys.readouterr().err
    assert ended.value.code == 2 and f"usage: {verb} [" in message and hint in message.splitlines()[-1]


def test_every_output_has_one_short_option():
    parsers, with_output = [build_parser()], 0
    while parsers:
        parser = parsers.pop()
        for action in parser._actions:
            parsers += action.choices.values() if isinstance(action, argparse._SubParsersAction) else []
            if "--out" in action.option_strings:
                with_output += 1
                assert "-o" in action.option_strings, parser.prog
    assert with_output > 20


def test_the_folder_of_the_demo_model_is_all_of_the_output(tmp_path, monkeypatch, capsys):
    """For "$(lm-edit demo)"."""
    monkeypatch.setattr("edit_hooks.assets.demo_model.demo_model_path", lambda dtype: tmp_path)
    assert main(["demo"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
