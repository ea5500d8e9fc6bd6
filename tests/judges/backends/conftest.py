"""A tiny judge model on disk, and its prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from reader_model import PROMPT, save_reader


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reader(tmp_path_factory.mktemp("reader"))


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "reader.txt"
    path.write_text(PROMPT, encoding="utf-8")
    return str(path)
