"""Names of classes: one thing each across the packages, and no participle for a thing."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from paths import ROOT

PACKAGES = ("edit_hooks", "judges", "lm_eval_tasks", "lm_edit")
# Name -> why several rooms may have a class of it. Private classes are of one module and not listed.
SHARED_NAMES = {
    "Cell": "a number with its interval, in the leaderboard's table and in a figure; neither imports the other",
    "Comparison": "several runs side by side in `results show`, and the paired test of two in the leaderboard",
}
PARTICIPLES = {
    "Excluded": "an exception: the state of a case",
    "Failed": "an exception: the state of a case",
    "Unscored": "an exception: the state of a value",
}


def public_classes() -> dict[str, list[str]]:
    """Class name -> the modules that define it at their top level."""
    found = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path.relative_to(ROOT).as_posix())
    return dict(found)


CLASSES = public_classes()


def test_a_class_name_is_used_once() -> None:
    repeated = {name: modules for name, modules in CLASSES.items() if len(modules) > 1}
    unexpected = {name: modules for name, modules in repeated.items() if name not in SHARED_NAMES}
    assert not unexpected, "rename one of each, or give the reason in SHARED_NAMES"
    assert SHARED_NAMES.keys() <= repeated.keys(), "these names are no longer shared"


def is_participle(name: str) -> bool:
    """Whether a name is one word that ends like a participle."""
    irregular = ("Built", "Drawn", "Found", "Held", "Kept", "Made", "Shown", "Written", "Chosen", "LeftOut")
    return name in irregular or (name.endswith("ed") and name[1:].islower())


def test_a_class_is_named_after_a_thing() -> None:
    assert {name for name in CLASSES if is_participle(name)} == PARTICIPLES.keys()


@pytest.mark.parametrize(("name", "expected"), [("Judged", True), ("LeftOut", True), ("JudgedTask", False)])
def test_participles_are_recognized(name: str, expected: bool) -> None:
    assert is_participle(name) is expected
