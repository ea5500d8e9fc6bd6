"""Content hashes: of JSON-able values, and of the source code that a result depends on."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

# Modules that change no number: errors, files, hashes and option parsing.
_NOT_COMPUTING = frozenset(
    f"edit_hooks.utils.{name}"
    for name in ("deprecation", "errors", "files", "hashing", "options", "plugins", "sqlite_cache", "yaml_io")
)


def key_of(content: object) -> str:
    """SHA-256 (hex) of a JSON-able value; equal values have equal keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@functools.cache
def code_fingerprint(*modules: str) -> str:
    """SHA-256 (hex) of the code behind a result: the modules and what they import, directly or not.

    Followed are imports within this package and within the packages of ``modules``, so an editor of another package is
    covered by its own source. Comments, docstrings and formatting do not count. Modules that only print, parse options
    or write files do not either, because nothing that computes imports them.
    """
    packages = {"edit_hooks", *(name.partition(".")[0] for name in modules)}
    digest = hashlib.sha256()
    for name, tree in sorted(_closure(modules, packages).items()):
        digest.update(f"{name}\0{ast.dump(tree)}\0".encode())
    return digest.hexdigest()


def _closure(modules: tuple[str, ...], packages: set[str]) -> dict[str, ast.Module]:
    """Syntax trees, without docstrings, of the modules and their imports within the packages."""
    trees: dict[str, ast.Module] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        path = _source_of(name)
        if name in trees or name in _NOT_COMPUTING or path is None:
            continue
        trees[name] = _without_docstrings(ast.parse(path.read_text(encoding="utf-8")))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        pending += [found for found in _imports(trees[name], package) if found.partition(".")[0] in packages]
    return trees


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Names that may be modules, of every import statement at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def _source_of(name: str) -> Path | None:
    """Source file of a module; ``None`` for attributes, extensions and missing modules."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return tree
