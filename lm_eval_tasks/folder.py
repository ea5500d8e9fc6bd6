"""The folder of the tasks of this package."""

from __future__ import annotations

import sys
from pathlib import Path

TASKS_DIR = Path(__file__).parent


def package_path() -> list[str]:
    """Folders whose sub-folders can be benchmarks: the package's ``__path__``."""
    return list(sys.modules[str(__package__)].__path__)
