"""Versions of the packages that influence a result."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import transformers


def installed_versions() -> dict[str, str]:
    """Return package -> version, for result files."""
    return {
        "lm-eval-editing": _version_of("lm-eval-editing"),
        "lm-eval": _version_of("lm-eval"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
