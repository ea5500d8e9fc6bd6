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
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for folder in (".github/workflows", "docs/templates/results/.github/workflows")
    for path in (ROOT / folder).glob("*.yml")
}
WORKFLOW = WORKFLOWS["ci"]
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
    named = [text.removeprefix(prefix) for text in PROJECT["project"]["classifiers"] if text.startswith(prefix + "3.")]
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


RUN_BY = {
    ("ci", "test"): "bash .ci/run",
    ("ci", "lm-eval"): "bash scripts/test.sh",
    ("ci", "distributions"): "bash scripts/check_release.sh",
    ("nightly", "slow"): "bash scripts/test.sh -m slow",
    ("nightly", "lowest"): "bash scripts/test.sh",
    ("nightly", "upstream"): "bash scripts/test.sh",
    ("docs", "build"): "bash scripts/site.sh site",
    ("docs", "publish"): None,
    ("publish", "build"): 'bash scripts/check_release.sh "${GITHUB_REF_NAME#v}"',
    ("publish", "publish"): None,
    ("check", "check"): "lm-edit leaderboard . -o site",
}


def test_every_job_runs_a_command_of_ours() -> None:
    assert {(name, job) for name, content in WORKFLOWS.items() for job in content["jobs"]} == set(RUN_BY)
    for (name, job), command in RUN_BY.items():
        commands = [step["run"] for step in WORKFLOWS[name]["jobs"][job]["steps"] if "run" in step]
        assert (commands[-1] if commands else None) == command, (name, job)
        for script in re.findall(r"bash ([\w./]+)", " ".join(commands)):
            assert (ROOT / script).is_file(), script
    for script in ("bash scripts/test.sh", "bash scripts/quickstart.sh"):
        assert script in (ROOT / ".ci/run").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_workflows_are_bounded_and_have_the_rights_that_they_need(name: str) -> None:
    content = WORKFLOWS[name]
    assert content[True], "YAML reads the key 'on' as true"
    assert content["permissions"] == {"contents": "read"}
    for title, job in content["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 300 and job["runs-on"] == "ubuntu-latest"
        needs = job.get("needs", [])
        assert {needs} <= set(content["jobs"]) if isinstance(needs, str) else set(needs) <= set(content["jobs"])
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"(actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1)", one) for one in uses)
        assert ("id-token" in job.get("permissions", {})) == (title == "publish"), "the right to identify itself"


def test_a_release_is_published_without_a_token_and_after_its_check() -> None:
    publish = WORKFLOWS["publish"]
    assert publish[True] == {"push": {"tags": ["v*"]}}
    job = publish["jobs"]["publish"]
    assert (job["needs"], job["environment"]) == ("build", "release")
    assert not [step for step in job["steps"] if "with" in step and "password" in step["with"]]
    assert "secrets." not in (ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8")


def test_the_nightly_run_has_the_main_branches_of_what_we_build_on_and_may_fail() -> None:
    job = WORKFLOWS["nightly"]["jobs"]["upstream"]
    assert job["continue-on-error"] is True
    assert [entry.split(" @ ")[0] for entry in job["strategy"]["matrix"]["package"]] == ["lm-eval", "transformers"]


def test_forms_have_what_they_need() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name == "config.yml":
            continue
        assert form["name"] and form["description"]
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids)) and all(part["attributes"]["label"] for part in form["body"])


def test_the_container_runs_the_quickstart() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == 'ENTRYPOINT ["bash", "scripts/quickstart.sh"]'
    assert "RUN bash -c 'source scripts/_setup.sh && set_up demo'" in lines
    needed = {"scripts", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "edit_hooks"}
    assert not needed & set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())


def test_the_changelog_has_the_version_with_its_date() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", changelog, flags=re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert released[0] == (PROJECT["project"]["version"], str(citation["date-released"]))


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
    assert [author["name"] for author in citation["authors"]] == ["lm-eval-editing contributors"]
    assert PROJECT["project"]["authors"] == citation["authors"]


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
