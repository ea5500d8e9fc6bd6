"""Objects named by ``package.module:attribute``, and those that installed packages register as entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from edit_hooks.utils.errors import EditingError


def import_object(path: str, what: str) -> Any:
    """The object at ``package.module:attribute``.

    Args:
        what: noun for the error message, as in ``editor``.

    Raises:
        EditingError: when the module or the attribute is missing. Errors inside the module itself are not caught.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise EditingError(
            f"{what} {path!r}: there is no module {error.name!r}; install its package or add its folder to PYTHONPATH."
        ) from None
    if not hasattr(module, attribute):
        raise EditingError(f"{what} {path!r}: module {module_name} has no {attribute!r}; give package.module:Class.")
    return getattr(module, attribute)


def registered(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group in installed packages, by name.

    Raises:
        EditingError: when two packages register one name for different objects.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise EditingError(
                f"two installed packages register {entry.name!r} in {group}: {other.value} and {entry.value}. "
                "Uninstall one of them."
            )
    return found
