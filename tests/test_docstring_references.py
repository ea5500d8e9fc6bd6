"""References in docstrings (``:class:`Delta```) name something: a renamed class or a moved module takes them along."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGES = ("edit_hooks", "judges", "lm_eval_tasks", "lm_edit")
REFERENCE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?([\w.]+)`")
IN_DOCUMENTS = re.compile(rf"`((?:{'|'.join(PACKAGES)})\.[\w.]+)[`(]")


@functools.cache
def module_file(name: str) -> Path | None:
    """The file of a module of ours."""
    path = ROOT / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Everything that a file defines, imports or assigns, at any depth, and the modules beside a package's file."""

    def found() -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).rpartition(".")[2]
        if path.name == "__init__.py":
            yield from (other.stem for other in path.parent.iterdir())
            # lazy public names
            yield from re.findall(r'"(\w+)"', path.read_text(encoding="utf-8"))

    return frozenset(found())


def names_something(reference: str, path: Path) -> bool:
    """Whether a reference in a file names a module, or what a module or this file knows."""
    parts = reference.split(".")
    if parts[0] not in PACKAGES:  # ``Delta.load``, or a name of another package
        return parts[0] in names_in(path) or parts[0] in sys.stdlib_module_names
    modules = [cut for cut in range(len(parts), 0, -1) if module_file(".".join(parts[:cut]))]
    rest = parts[modules[0] :]
    file = module_file(".".join(parts[: modules[0]]))
    return file is not None and all(name in names_in(file) for name in rest)


@pytest.mark.parametrize("package", PACKAGES)
def test_references_name_something(package: str) -> None:
    stale = [
        f"{path.relative_to(ROOT)}: {reference}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for reference in REFERENCE.findall(path.read_text(encoding="utf-8"))
        if not names_something(reference, path)
    ]
    assert not stale, "\n".join(stale)


def test_documents_name_something() -> None:
    documents = [path for folder in (ROOT, *(ROOT / "docs").rglob("*/")) for path in folder.glob("*.md")]
    found = [(path, name) for path in documents for name in IN_DOCUMENTS.findall(path.read_text(encoding="utf-8"))]
    ours = [(path, name) for path, name in found if not name.endswith((".py", ".md", ".yaml")) and "my_" not in name]
    stale = [f"{path.relative_to(ROOT)}: {name}" for path, name in ours if not names_something(name, path)]
    assert ours
    assert not stale, "\n".join(stale)


@pytest.mark.parametrize(
    "reference",
    ["Gone", "edit_hooks.base.gone", "edit_hooks.base.editor.Gone", "edit_hooks.deltas.delta.Delta.gone", "gone.Name"],
)
def test_a_stale_reference_is_found(reference: str) -> None:
    assert not names_something(reference, ROOT / "edit_hooks/base/editor.py")
