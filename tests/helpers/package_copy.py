"""A copy of the packages in which a test edits source files, and commands that run in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paths import ROOT
from warm_python import run_warm

PACKAGES = ("edit_hooks", "judges", "lm_eval_tasks", "lm_edit")


def copy_packages(folder: Path) -> Path:
    """Copy the four packages into a folder, byte code included: only changed files are compiled again."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    return folder


def insert(path: Path, after: str, line: str) -> None:
    """Insert a line after a line that occurs once in a file."""
    text = path.read_text(encoding="utf-8")
    assert text.count(f"{after}\n") == 1, f"{path} does not hold the line {after!r} once"
    path.write_text(text.replace(f"{after}\n", f"{after}\n{line}\n"), encoding="utf-8")


def run_python(*words: str, path: Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with ``path`` first on the import path, in ``folder`` (``path`` when absent)."""
    search = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return run_warm(words, env={**os.environ, "PYTHONPATH": search}, cwd=folder or path)


def lm_edit(*words: str, path: Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the ``lm-edit`` command, see :func:`run_python`."""
    return run_python("-m", "lm_edit.cli.main", *words, path=path, folder=folder)


def check_editors(*calls: Sequence[str], path: Path, then: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``lm-edit check-editor`` once per list of words and then some code, all in one process, up to a failure."""
    code = f"import sys\nfrom lm_edit.cli.main import main\nfor words in {[list(words) for words in calls]!r}:\n"
    code += f"    if main(['check-editor', *words]):\n        sys.exit(1)\n{then}"
    return run_python("-c", code, path=path)
