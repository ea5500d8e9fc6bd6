"""Objects by ``package.module:attribute``; entry points of installed packages."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from edit_hooks.utils.errors import EditingError


def import_object(path: str, noun: str) -> Any:
    """Import the object at ``package.module:attribute``; a module may also be in the working folder.

    Args:
        noun: kind of object for the error message, as in ``editor``.

    Raises:
        EditingError: if the path is malformed, the module or the attribute is missing, or the import fails; the last
            with the original exception as its cause.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise EditingError(f"{noun} {path!r} has another form than package.module:Class.")
    if "/" in module_name or os.sep in module_name or module_name.endswith(".py"):
        name = Path(module_name).name.removesuffix(".py")
        raise EditingError(
            f"{noun} {path!r}: {module_name} is a file, and the name of a module is needed: {name}:{attribute}. Its "
            "folder is searched if it is the working folder or in PYTHONPATH."
        )
    try:
        module = _import(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _import_failure(path, noun, error) from error
        raise EditingError(
            f"{noun} {path!r}: there is no module {error.name!r}; install its package or add its folder to PYTHONPATH "
            "(the working folder is searched, too)."
        ) from None
    except Exception as error:  # a module of another package may raise anything
        raise _import_failure(path, noun, error) from error
    if not hasattr(module, attribute):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise EditingError(
            f"{noun} {path!r}: module {module_name} has no {attribute!r}. It defines: {', '.join(own) or 'no class'}."
        )
    return getattr(module, attribute)


def _import(name: str) -> ModuleType:
    """Import a module; commands of an installed package lack the working folder in their import path."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top, folder = Path(name.partition(".")[0]), os.getcwd()
        is_here = top.with_suffix(".py").is_file() or top.is_dir()
        if error.name != top.name or not is_here or folder in sys.path:
            raise
        sys.path.append(folder)  # last, so that it hides no installed module
        importlib.invalidate_caches()
        return importlib.import_module(name)


def is_own(cls: type) -> bool:
    """Whether a class belongs to this package, not to another one or to a script."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group in installed packages, by name.

    Raises:
        EditingError: if two packages register one name for different objects.
    """
    by_name: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        first = by_name.setdefault(entry.name, entry)
        if first.value != entry.value:
            raise EditingError(
                f"two installed packages register {entry.name!r} in {group}: {_origin(first)} and {_origin(entry)}. "
                "Uninstall one of them."
            )
    return by_name


def _import_failure(path: str, noun: str, error: Exception) -> EditingError:
    """Create an error with cause and line, because commands print no traceback."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return EditingError(
        f"{noun} {path!r} cannot be imported: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})."
    )


def _origin(entry: EntryPoint) -> str:
    return f"{entry.value} of {entry.dist.name}" if entry.dist is not None else entry.value
