"""The project's own files agree: metadata, workflow, versions, typing markers, layout of the tests."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from package_copy import PACKAGES
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from paths import ROOT, TESTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
# Tests of several modules at once, or of the project as a whole; every other folder mirrors a package.
OTHER_TESTS = {"adversarial", "contract", "end_to_end", "parity", "scripts", "site"}


def lm_eval_bound() -> str:
    (bound,) = [text for text in PROJECT["project"]["dependencies"] if text.startswith("lm-eval")]
    return str(bound).removeprefix("lm-eval")


def test_the_workflow_covers_the_supported_versions() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.10"
    pythons = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.10", "3.11", "3.12", "3.13"]
    prefix = "Programming Language :: Python :: "
    named = [text.removeprefix(prefix) for text in PROJECT["project"]["classifiers"] if text.startswith(prefix)]
    assert named == pythons
    bounds = re.fullmatch(r">=([\d.]+),(<[\d.]+)", lm_eval_bound())
    assert bounds
    oldest, newest = bounds.groups()
    assert WORKFLOW["jobs"]["lm-eval"]["strategy"]["matrix"]["lm-eval"] == [f"=={oldest}", newest]
    assert newest == "<0.5"


def test_every_pinned_version_can_be_installed_where_it_is_pinned() -> None:
    """On the first release of each Python; of the versions that are installed here, which say what they need."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    checked = 0
    for pin in (Requirement(line) for line in lines if not line.startswith("#")):
        try:
            installed = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not pin.specifier.contains(installed.version):
            continue
        needed, checked = SpecifierSet(installed.metadata["Requires-Python"] or ""), checked + 1
        for python in ("3.10", "3.11", "3.12", "3.13"):
            if pin.marker is None or pin.marker.evaluate(
                {"python_version": python, "python_full_version": f"{python}.0"}
            ):
                assert f"{python}.0" in needed, f"{pin} is pinned for Python {python} and needs {needed}"
    assert checked > 20


@pytest.mark.parametrize(("job", "command"), [("test", "bash .ci/run"), ("lm-eval", "bash scripts/test.sh")])
def test_the_workflow_runs_the_commands_of_the_readme(job: str, command: str) -> None:
    commands = [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]
    assert set(WORKFLOW["jobs"]) == {"test", "lm-eval"} and commands[-1] == command
    for script in ("bash scripts/test.sh", "bash scripts/quickstart.sh"):
        assert f"\n{script}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert script in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_the_test_command_and_pre_commit_run_every_check() -> None:
    script = (ROOT / "scripts/test.sh").read_text(encoding="utf-8")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    entries = {hook["entry"] for hook in hooks}
    for check in ("ruff check", "ruff format", "lint-imports", "mypy"):
        assert check in script and any(entry.startswith(check) for entry in entries)


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["title"] == PROJECT["project"]["name"]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert package in PROJECT["tool"]["mypy"]["packages"]


def test_tests_mirror_the_packages() -> None:
    for path in TESTS.rglob("test_*.py"):
        folder = path.relative_to(TESTS).parent
        if folder == Path() or folder.parts[0] in OTHER_TESTS:
            continue
        assert (ROOT / folder).is_dir(), f"{path.relative_to(ROOT)} tests no package of ours"


def test_no_test_imports_another_test() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert not any(part.startswith("test_") for part in module.split(".")), f"{path} imports {module}"


def test_nothing_is_evaluated_or_unpickled() -> None:
    """Neither in the packages nor in the scripts."""
    banned = {"eval", "exec", "literal_eval", "pickle", "cPickle", "dill", "cloudpickle"}
    for folder in (*PACKAGES, "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            names |= {call.id for call in calls if isinstance(call, ast.Name)}
            names |= {call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr == "literal_eval"}
            assert not names & banned, f"{path.relative_to(ROOT)}: {sorted(names & banned)}"
