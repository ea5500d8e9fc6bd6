"""Installed packages that exist for one test."""

from __future__ import annotations

from pathlib import Path

import pytest


def install_package(
    site: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, entry_points: dict[str, dict[str, str]]
) -> None:
    """Put a one-module package with entry points (group -> name -> object) on the import path."""
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{module}.py").write_text(source, encoding="utf-8")
    metadata = site / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    lines = []
    for group, objects in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in objects.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
