"""lm-eval's look for the commit of the working folder prints nothing of git's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lm_eval.loggers.utils import get_git_commit_hash

from lm_eval_tasks.startup.evaluation import extend_evaluator


def quiet_hash() -> Any:
    """The function that runs call; the suite replaces that of the imported module."""
    evaluator: Any = ModuleType("evaluator")
    evaluator.simple_evaluate = evaluator.evaluate = lambda: None
    evaluator.get_git_commit_hash = get_git_commit_hash
    extend_evaluator(evaluator)
    return evaluator.get_git_commit_hash


def test_outside_of_a_clone_git_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert quiet_hash()() is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("has_git", [True, False])
def test_the_hash_is_that_of_lm_eval(has_git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    monkeypatch.chdir(tmp_path)
    if not has_git:
        monkeypatch.setenv("PATH", "")
    found = quiet_hash()()
    assert found == get_git_commit_hash()
    monkeypatch.undo()
    assert found and git("rev-parse", "HEAD").startswith(found)
