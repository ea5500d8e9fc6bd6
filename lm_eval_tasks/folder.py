"""Folders of tasks: that of this package, and those of other packages."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

TASKS_DIR = Path(__file__).parent


def package_path() -> list[str]:
    """Folders whose sub-folders can be benchmarks: the package's ``__path__``."""
    return list(sys.modules[str(__package__)].__path__)


def folder_of(module: str) -> str:
    """The folder of a module inside a package, found without importing either of them."""
    package, *parts = module.split(".")
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"no module named {package!r}")
    # A module outside a package is refused: its folder would be site-packages as a whole.
    for location in spec.submodule_search_locations or ():
        path = os.path.join(location, *parts)
        if os.path.isdir(path):
            return path
        if os.path.isfile(f"{path}.py"):
            return os.path.dirname(path)
    raise ModuleNotFoundError(f"{module!r} is no module of a package")
