"""Private members of lm-eval that the tasks use: they exist, and only ``harness.py`` reads them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.manager import TaskManager
from task_runs import FOLDER, build

from lm_eval_tasks.common.task import harness
from lm_eval_tasks.common.task.filters import NaturalStop
from lm_eval_tasks.common.task.harness import PRIVATE_MEMBERS, filter_classes
from lm_eval_tasks.startup.lazy_index import NAME_LISTS

HARNESS = Path(harness.__file__)
INSTANCES = {"lm_eval.api.task:ConfigurableTask": (ConfigurableTask, lambda: build("bake_es"))}
# Members of the task manager that the start-up extensions read or replace.
OF_START_UP = {"_check_duplicates", "_index"}


@pytest.mark.parametrize(
    ("path", "member"), [(path, name) for path, names in PRIVATE_MEMBERS.items() for name in names]
)
def test_lm_eval_still_has_the_member(path: str, member: str) -> None:
    expected, make = INSTANCES[path]
    instance = make()
    assert isinstance(instance, expected)
    assert hasattr(instance, member), f"lm-eval's {path} no longer has {member}; adapt harness.py"


def test_the_list_is_complete() -> None:
    assert set(private_attributes(HARNESS)) == {name for names in PRIVATE_MEMBERS.values() for name in names}


@pytest.mark.parametrize("path", [p for p in sorted(FOLDER.rglob("*.py")) if p != HARNESS], ids=str)
def test_other_modules_use_their_own_private_members_only(path: Path) -> None:
    listed = OF_START_UP if path.parent.name == "startup" else set()
    assert set(private_attributes(path)) <= {*private_definitions(path), *listed}


def test_start_up_extends_what_lm_eval_still_has() -> None:
    manager = TaskManager(include_defaults=False)
    assert all(hasattr(manager, member) for member in {*OF_START_UP, *NAME_LISTS})


def private_attributes(path: Path) -> Iterator[str]:
    """Names with one leading underscore that the code of a module reads or sets as attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr


def private_definitions(path: Path) -> Iterator[str]:
    """Functions and methods of a module, attributes that classes without a base set, and those of named tuples."""
    yield from ("_asdict", "_fields", "_replace")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef) and not node.bases:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield inner.attr


def test_an_attribute_of_a_base_is_no_own_one(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    for base, own in (("", True), ("(Task)", False)):
        path.write_text(f"class A{base}:\n    def __init__(self):\n        self._config = 1\n", encoding="utf-8")
        assert ("_config" in private_definitions(path)) == own
        assert list(private_attributes(path)) == ["_config"]


def test_pipelines_list_their_filter_classes() -> None:
    (pipeline,) = build("bake_es").pipelines
    assert pipeline.name == "none" and filter_classes(pipeline) == [NaturalStop]


def test_predict_only_is_recognized() -> None:
    task = build("bake_es")
    assert not task.is_predict_only
    task.override_metric("bypass")
    assert task.is_predict_only
