"""The command that each figure prints is accepted, on the embedded samples."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter

import pandas as pd
import pytest
from lm_eval.utils import simple_parse_args_string
from lm_runs import EditedHFLM
from task_managers import task_manager

from lm_edit.cli.main import build_parser
from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.needs import DATA, Options
from lm_edit.figures.registry import all_figures, find_figure

COMMANDS = sorted({spec.needs.command for spec in all_figures()})
RUNS = [command for command in COMMANDS if command.startswith("lm_eval ")]
VERBS = [command for command in COMMANDS if command.startswith("lm-edit ")]


def options_of(command: str) -> dict[str, str]:
    """Flag -> value of a command of lm-eval, of the flags with one."""
    words = shlex.split(command)
    return {flag: value for flag, value in itertools.pairwise(words) if flag.startswith("--")}


def test_every_figure_has_one() -> None:
    assert set(RUNS) | set(VERBS) == set(COMMANDS)
    assert not [command for command in COMMANDS if "..." in command or "<" in command]


@pytest.mark.parametrize("command", RUNS)
def test_runs_find_their_edits_and_records(command: str, tiny_path) -> None:
    """All checks before weights are loaded: options, settings of the editor, edits, tasks and their records."""
    given = options_of(command)
    assert given["--model"] == "edited_hf" and given["--output_path"] == "results"
    arguments = {**simple_parse_args_string(given["--model_args"]), "data": "mini"}
    lm = EditedHFLM(pretrained=str(tiny_path("llama")), device="cpu", store="off", **arguments)
    assert lm._model is None
    if "num_edits" in arguments:
        assert sum(len(cases) for cases in lm.plan.cases) == arguments["num_edits"]
    tasks = task_manager(arguments).load(given["--tasks"].split(","))["tasks"]
    assert tasks and all(len(list(task.eval_docs)) >= 5 for task in tasks.values())


@pytest.mark.parametrize("command", VERBS)
def test_verbs_accept_their_arguments(command: str) -> None:
    verb, *words = shlex.split(command)[1:]
    assert build_parser().parse_args([verb, *words]).verb == verb


@pytest.mark.parametrize("name", [spec.name for spec in all_figures() if spec.needs.reads == DATA])
def test_tables_of_data_are_made_of_the_samples(name: str) -> None:
    spec = find_figure(name)
    words = Counter(shlex.split(spec.needs.command))
    assert words["--data"] and words[name]
    table = spec.draw(pd.DataFrame(), Options(data="mini"))  # it reads no files
    assert isinstance(table, Table) and table.rows
