"""Public names of a package, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use.

    ``lm-edit --help`` and a task's YAML import the package; they must not wait for torch. The first use also checks
    the versions of what the names are built on.

    Args:
        package: name of the package, its ``__name__``.
        homes: public name -> module that defines it, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from edit_hooks.utils.requirements import require_versions  # the start-up hook imports packages, and no name

        require_versions()
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *homes})

    return get, names
