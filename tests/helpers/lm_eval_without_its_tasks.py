"""The command `lm_eval` without lm-eval's own 14,000 task files, which every process takes ten seconds to index."""

import sys
import tempfile
from pathlib import Path

import lm_eval.tasks.manager
from lm_eval.__main__ import cli_evaluate

import lm_eval_editing_autoload  # noqa: F401  # makes the model known where start-up files are not read

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lm_eval.tasks.manager.__file__ = str(Path(folder) / "manager.py")
        sys.exit(cli_evaluate())
