"""The files of a release: built from the checkout, installed without it, and run from an empty folder.

Slow; `scripts/check_release.sh` and the continuous integration run it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh_environments import Environment
from paths import ROOT

pytestmark = pytest.mark.slow
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
NAME = "lm_eval_editing-" + PROJECT.partition('\nversion = "')[2].partition('"')[0]


def build(source: Path, out: Path, *targets: str) -> None:
    options = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *options, "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, the source distribution, its folder, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "sdist", "wheel")
    sdist, wheel = out / f"{NAME}.tar.gz", out / f"{NAME}-py3-none-any.whl"
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "source", filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(
            out / "source"
        )
    folder = out / "source" / NAME
    build(folder, out / "again", "wheel")
    return {"sdist": sdist, "wheel": wheel, "folder": folder, "again": out / "again" / wheel.name}


def test_the_source_distribution_gives_the_same_wheel(files: dict[str, Path]) -> None:
    contents = []
    for wheel in (files["wheel"], files["again"]):
        with zipfile.ZipFile(wheel) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    assert contents[0] == contents[1] and len(contents[0]) > 400


def test_it_has_the_tests_and_what_they_read(files: dict[str, Path]) -> None:
    needed = [
        "tests/conftest.py",
        "scripts/test.sh",
        "constraints.txt",
        ".github/workflows/ci.yml",
        ".ci/run",
        "Dockerfile",
    ]
    needed += ["docs/templates/results/.github/workflows/check.yml", "LICENSE", "README.md", "CITATION.cff"]
    assert [name for name in needed if not (files["folder"] / name).is_file()] == []
    assert not list(files["folder"].rglob("__pycache__")) and not (files["folder"] / "shared").exists()


def test_metadata_name_version_license_and_readme(files: dict[str, Path]) -> None:
    with zipfile.ZipFile(files["wheel"]) as archive:
        metadata = archive.read(f"{NAME}.dist-info/METADATA").decode()
        assert f"{NAME}.dist-info/licenses/LICENSE" in archive.namelist()
    for line in (
        "Name: lm-eval-editing",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.10",
        "# lm-eval-editing",
    ):
        assert f"\n{line}\n" in f"\n{metadata}\n", line


def test_an_evaluation_from_an_empty_folder(
    files: dict[str, Path], tmp_path: Path, tiny_path: Callable[[str], Path]
) -> None:
    environment = Environment(tmp_path / "environment")
    environment.pip("install", "--no-deps", "--no-index", str(files["again"]))
    model = f"pretrained={tiny_path('llama')},editor=ft_m,editor_args=num_steps:1,data=mini,store=off"
    words = ["--model", "edited_hf", "--model_args", model, "--tasks", "bake_rq", "--limit", "1", "--device", "cpu"]
    generation = ["--gen_kwargs", "max_gen_toks=1", "--output_path", "results", "--log_samples"]
    done = environment.call("-m", "lm_eval", *words, *generation)
    assert done.returncode == 0 and "reverse_qa_prob" in done.stdout, done.stderr[-3000:]
    (saved,) = (environment.work / "results").rglob("results_*.json")
    assert json.loads(saved.read_text(encoding="utf-8"))["config"]["edited_hf"]["editor"] == "ft_m"
    checked = environment.call("-m", "lm_edit.cli.main", "results", "check", "results")
    assert (checked.returncode, checked.stdout) == (0, "1 result files, 0 problems\n"), checked.stderr
