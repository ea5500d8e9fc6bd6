"""Folders that tests read from."""

from __future__ import annotations

import os
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
RECORDS = TESTS / "records"
CASES = TESTS / "cases"
GOLDEN = TESTS / "golden"
# Published benchmark data that is not part of the repository.
REAL_DATA = Path(os.environ.get("LM_EDIT_SHARED_DATA") or ROOT.parent / "shared" / "data")
# The runs that the numbers under GOLDEN were packed from.
UNPACKED_GOLDEN = REAL_DATA.parent / "golden"
