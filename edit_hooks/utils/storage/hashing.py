"""Content hashes of JSON-able values and of the source code behind a result."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from edit_hooks.utils.errors import EditingError

# Modules that change no number of an edit: errors, files, hashes, option parsing, the table of editors, what edits cost
# and which damage they do.
_NOT_COMPUTING = frozenset(
    f"edit_hooks.{name}"
    for name in (
        "base.registry",
        "inference.effects.damage",
        "lm.editing.cost",
        "utils.errors",
        "utils.storage.files",
        "utils.storage.hashing",
        "utils.settings.options",
        "utils.storage.outputs",
        "utils.plugins",
        "utils.progress",
        "utils.public_names",
        "utils.storage.sqlite_cache",
        "utils.storage.yaml_io",
    )
)

# Packages of this distribution. In a clone they lie beside the files of a user and are still not helpers of an editor.
_OWN_PACKAGES = frozenset(("edit_hooks", "judges", "lm_edit", "lm_eval_tasks"))


def key_of(content: object) -> str:
    """SHA-256 (hex) of a JSON-able value; equal values have equal keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@functools.cache
def code_fingerprint(*modules: str) -> str:
    """SHA-256 (hex) of the code behind a result: modules and all that they import.

    Imports are followed within this package and the packages of ``modules``, and to modules beside the latter, so an
    editor of a user is covered together with its helpers. Other installed packages are not followed. Comments,
    docstrings and formatting do not count, nor do modules that change no number.

    Raises:
        EditingError: if a module has no source file, as in a notebook.
    """
    for name in modules:
        if _source_of(name) is None:
            raise EditingError(
                f"module {name!r} has no source file, so a change of its code would go unnoticed and stored results "
                "would be stale. Move the editor into a .py file on PYTHONPATH."
            )
    digest = hashlib.sha256()
    for name, of_module in sorted(_closure(modules).items()):
        digest.update(f"{name}\0{of_module}\0".encode())
    return digest.hexdigest()


def has_source(module: str) -> bool:
    """Whether a module's code can be fingerprinted."""
    return _source_of(module) is not None


def _closure(modules: tuple[str, ...]) -> dict[str, str]:
    """Digests of the modules and of the imports to follow."""
    packages = {"edit_hooks", *map(_package_of, modules)}
    folders = {_import_folder(name) for name in packages - _OWN_PACKAGES} - {None}
    digests: dict[str, str] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        path = _source_of(name)
        if name in digests or name in _NOT_COMPUTING or path is None:
            continue
        state = path.stat()
        digests[name], imports = _read_module(name, path, state.st_mtime_ns, state.st_size)
        for imported in imports:
            package = _package_of(imported)
            if package in packages or (package not in _OWN_PACKAGES and _import_folder(package) in folders):
                pending.append(imported)
    return digests


@functools.cache
def _read_module(name: str, path: Path, modified: int, size: int) -> tuple[str, frozenset[str]]:
    """Digest of a module's syntax tree without docstrings, and the names it imports; read again once the file changes.

    The modules of one run have most imports in common, and parsing takes most of the time.
    """
    words: list[str] = []
    imports: list[ast.Import | ast.ImportFrom] = []
    _flatten(ast.parse(path.read_text(encoding="utf-8")), words, imports)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    digest = hashlib.sha256("\0".join(words).encode(errors="surrogatepass")).hexdigest()
    return digest, frozenset(_imported(imports, package))


def _flatten(node: ast.AST, words: list[str], imports: list[ast.Import | ast.ImportFrom]) -> None:
    """Append the classes and values of a syntax tree, except docstrings, and its import statements at any depth.

    One pass: ``ast.dump`` behind two of ``ast.walk`` takes four times as long, 0.2 s of the start of a run.
    """
    words.append(type(node).__name__)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        imports.append(node)
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            _flatten(value, words, imports)
        elif isinstance(value, list):
            words.append("[")
            for member in _without_docstring(node, value) if name == "body" else value:
                if isinstance(member, ast.AST):
                    _flatten(member, words, imports)
                else:
                    words.append(repr(member))
            words.append("]")
        else:
            words.append(repr(value))


def _without_docstring(node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        first = body[0] if body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return body[1:] or [ast.Pass()]
    return body


def _package_of(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def _import_folder(package: str) -> Path | None:
    """Folder that contains a top-level package or module; ``None`` if installed."""
    path = _source_of(package)
    if path is None or {"site-packages", "dist-packages"} & set(path.parts):
        return None
    return path.parents[1] if path.name == "__init__.py" else path.parent


def _imported(statements: list[ast.Import | ast.ImportFrom], package: str) -> Iterator[str]:
    """Yield the names that may be modules, of every import statement of a module of a package."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def _source_of(name: str) -> Path | None:
    """Find the source file of a module without importing it.

    Returns:
        ``None`` for attributes, extension modules and missing modules.
    """
    if name == "__main__":
        file = getattr(sys.modules[name], "__file__", None)
        return Path(file) if file is not None else None
    package, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(package) if package else None
    except ValueError:  # a module without a spec
        return None
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        package = f"{package}.{part}"
        spec = PathFinder.find_spec(package, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None
