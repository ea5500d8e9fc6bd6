"""``lm-edit sweep --only``: the syntax of ``results show``, and parts of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb

from edit_hooks import EditingError
from lm_edit.sweeps.checking import tasks
from lm_edit.sweeps.checking.checks import check_plan
from lm_edit.sweeps.planning.grid import Grid
from lm_edit.sweeps.planning.plan import load_plan
from lm_edit.sweeps.planning.selection import select_runs

PLAN = """
models: {small: {pretrained: a/b}, large: {pretrained: c/d, dtype: bfloat16}}
editors:
  - unedited
  - rome
  - {editor: ft_m, name: "tuned, long", editor_args: {num_steps: 2}}
benchmarks:
  - {name: bake, tasks: [bake_es], metadata: {separator: space}}
modes: [single, {mode: sequential, name: stream, num_edits: 4, edit_batch_size: 1}]
icl: [false, true]
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(PLAN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_edit.sweeps.checking.tasks._all_tasks", tasks._own_tasks)
        return check_plan(load_plan(path))


def chosen(grid: Grid, *texts: str) -> set[str]:
    return {run.name for run in select_runs(grid, texts, "the plan")}


def test_fields_and_values(grid: Grid) -> None:
    every = {run.name for run in grid.runs}
    assert len(every) == 2 * (1 + 2 * 2 * 2) == len(chosen(grid))
    small = {name for name in every if name.startswith("small, ")}
    streams = {name for name in every if ", stream, " in name}
    long = {name for name in every if ", tuned, long, " in name}
    assert chosen(grid, "model=small") == chosen(grid, "model=a/b") == chosen(grid, "pretrained=a/b") == small
    assert chosen(grid, "mode=stream") == chosen(grid, "mode=sequential") == chosen(grid, "num_edits=4") == streams
    assert chosen(grid, "editor=ft_m") == chosen(grid, "editor=tuned, long") == chosen(grid, "editor_label=tuned, long")
    assert chosen(grid, "editor=ft_m") == long
    assert chosen(grid, "editor=rome,ft_m", "editor=unedited") == every
    assert chosen(grid, "mode=none,single") == every - streams
    assert chosen(grid, "icl=yes", "model=large") == {name for name in every - small if name.endswith("icl")}
    assert chosen(grid, "separator=space", "edit_context=bare", "dtype=") == small  # a default, and no value
    assert chosen(grid, *(f"name={name}" for name in sorted(long))) == long
    assert [run.name for run in select_runs(grid, ["editor=rome"], "")] == [
        run.name for run in grid.runs if ", rome, " in run.name
    ]


def test_texts_in_names_are_alternatives(grid: Grid) -> None:
    every = {run.name for run in grid.runs}
    expected = {name for name in every if "small, rome" in name or "unedited" in name}
    assert chosen(grid, "small, rome", "unedited") == expected and len(expected) == 2 + 4
    assert chosen(grid, "rome", "mode=single", "icl=no") == {
        f"{name}, rome, bake, single" for name in ("small", "large")
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["editr=rome"], r"runs have no such field. Did you mean 'editor' or .* Accepted: editor, "),
        (["editor=rome,ftm"], r"--only editor=ftm leaves no run; editor is one of: ft_m, .*Did you mean 'ft_m'"),
        (["single", "uneditd"], r"'uneditd': the plan has no run with this text .*small, unedited.*mean 'unedited'"),
        (["mode=none", "seed=1"], "seed is one of: 0"),
        (["mode=none", "editor=rome"], "the plan has no run with mode=none and editor=rome"),
    ],
)
def test_what_no_run_has_is_named(grid: Grid, texts: list[str], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        chosen(grid, *texts)


def test_the_command_reads_it(tmp_path: Path, capsys: Any) -> None:
    words = ["sweep", "example", "--out", str(tmp_path), "--status", "--only"]
    assert run_verb([*words, "editor=memit", "--only", "mode=single"]) == 0
    printed = capsys.readouterr().out
    assert "memit" in printed and "grace" not in printed and "sequential" not in printed
    assert run_verb([*words, "editor=memt"]) == 2
    assert "Did you mean 'memit'?" in capsys.readouterr().err
