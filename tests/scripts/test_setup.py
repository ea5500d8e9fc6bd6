"""scripts/_setup.sh chooses the build of torch: without a GPU that for CPUs, unless the user wants another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

# Answers `-m pip install --report` from a file, logs every other installation, and is Python otherwise.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = -m ]; then
  case "$*" in
    *--report*) cat "$FAKE/report"; exit ;;
    *) echo "$*" >> "$FAKE/installed"; exit ;;
  esac
fi
exec {python} "$@"
"""
SCRIPT = """
set -euo pipefail
source scripts/_setup.sh
VENV="$FAKE" CONSTRAINTS=""
has_torch() { return 1; }
uname() { echo "$SYSTEM"; }
has_gpu() { [ "$GPU" = yes ]; }
install_torch torch==2.13.0
"""
CUDA = {"torch": "2.13.0", "nvidia-cublas-cu13": "13.1", "filelock": "4.0"}
CPU = {"torch": "2.13.0+cpu", "filelock": "4.0"}
UV = "-m uv pip install"


def installed(tmp_path: Path, found: dict[str, str] | None, gpu: str, system: str = "Linux", **settings: str) -> str:
    """What the script installs where pip finds these packages."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(FAKE_PYTHON.replace("{python}", sys.executable))
    python.chmod(0o755)
    entries = [{"metadata": {"name": name, "version": version}} for name, version in (found or {}).items()]
    (tmp_path / "report").write_text(json.dumps({"install": entries}) if found else "")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LM_EDIT_TORCH")}
    environ |= {"FAKE": str(tmp_path), "GPU": gpu, "SYSTEM": system, **settings}
    done = subprocess.run(["bash", "-c", SCRIPT], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "installed").read_text()


@pytest.mark.parametrize(
    ("found", "gpu", "system", "settings", "by_uv"),
    [
        (CUDA, "no", "Linux", {}, True),
        (CPU, "no", "Linux", {}, False),  # an index of the user has it
        (None, "no", "Linux", {}, True),  # a pip too old to report
        (CUDA, "yes", "Linux", {}, False),
        (CUDA, "yes", "Linux", {"LM_EDIT_TORCH": "cpu"}, True),
        (CUDA, "no", "Linux", {"LM_EDIT_TORCH": "default"}, False),
        (CUDA, "no", "Darwin", {}, False),
    ],
)
def test_the_build_fits_the_machine(
    tmp_path: Path, found: dict[str, str] | None, gpu: str, system: str, settings: dict[str, str], by_uv: bool
) -> None:
    log = installed(tmp_path, found, gpu, system, **settings)
    lines = log.splitlines()
    assert lines[-1].endswith("torch==2.13.0")
    assert (UV in lines[-1]) == by_uv == (len(lines) == 2)
    assert not by_uv or "--torch-backend cpu" in lines[-1]


def test_a_named_index_is_given_to_pip(tmp_path: Path) -> None:
    log = installed(tmp_path, CUDA, "no", LM_EDIT_TORCH_INDEX="https://mirror.example/cpu")
    assert "--extra-index-url https://mirror.example/cpu torch==2.13.0" in log and UV not in log


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="accepted are cpu and default"):
        installed(tmp_path, CUDA, "no", LM_EDIT_TORCH="cuda")


def test_an_installed_torch_is_kept() -> None:
    for requirement, kept in (("torch>=2.4", True), ("torch==1.0", False)):
        code = f'source scripts/_setup.sh; VENV="$V"; has_torch "{requirement}"'
        environ = {**os.environ, "V": str(Path(sys.executable).parents[1])}
        assert (subprocess.run(["bash", "-c", code], cwd=ROOT, env=environ).returncode == 0) == kept


@pytest.mark.parametrize(
    ("asked", "fingerprint", "done"),
    [
        ("demo", "now", True),
        ("test,demo", "now", True),  # in another order, beside another extra
        ("demo,report", "now", False),
        ("dem", "now", False),  # not part of a name
        ("demo", "earlier", False),
    ],
)
def test_fewer_extras_than_are_installed_need_nothing(tmp_path: Path, asked: str, fingerprint: str, done: bool) -> None:
    (tmp_path / ".lm-eval-editing-demo-leaderboard-test").write_text("now\n")
    code = f'source scripts/_setup.sh; installed_from_here() {{ true; }}; VENV="$V"; is_set_up {asked} {fingerprint}'
    environ = {**os.environ, "V": str(tmp_path)}
    assert (subprocess.run(["bash", "-c", code], cwd=ROOT, env=environ).returncode == 0) == done
