"""Arguments and output of ``lm-edit`` in tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, REQUESTS
from lm_edit.cli.main import main

FAST_SETTINGS = {"num_steps": 3, "context_templates": CONTEXT_TEMPLATES}


def run_verb(arguments: Sequence[str]) -> int:
    """Run ``lm-edit``; return its exit code, also where the parser of arguments ends the process."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def write_requests(path: Path) -> Path:
    """Write the edit requests of the tiny models as JSONL, with case ids c0, c1, ..."""
    records = [{"case_id": f"c{number}", **request} for number, request in enumerate(REQUESTS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_settings(path: Path) -> Path:
    """Write settings under which locate-then-edit editors are fast on tiny models."""
    path.write_text(json.dumps(FAST_SETTINGS), encoding="utf-8")
    return path


def printed_lines(capsys: Any) -> list[str]:
    """Lines of standard output since the last call."""
    return capsys.readouterr().out.strip().split("\n")


def split_cells(line: str) -> list[str]:
    """Cells of a line of a printed table."""
    return re.split(r"\s{2,}", line.strip())
