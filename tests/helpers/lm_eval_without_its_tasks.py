"""The command `lm_eval` without lm-eval's own 14,000 task files, which every process takes ten seconds to index.

Nor does it describe the machine, for which lm-eval starts a dozen programs at the end of a run. Several commands can be
given, the word `then` between them; they run one after another in this process, and SEPARATOR on standard error of
rank 0 stands between their logs.
"""

import itertools
import os
import sys
import tempfile
from pathlib import Path

import lm_eval.evaluator
import lm_eval.tasks.manager
from lm_eval.__main__ import cli_evaluate

import lm_eval_editing_autoload  # noqa: F401  # makes the model known where start-up files are not read

SEPARATOR = "==then=="

if __name__ == "__main__":
    lm_eval.evaluator.add_env_info = lambda storage: None
    program, *words = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        lm_eval.tasks.manager.__file__ = str(Path(folder) / "manager.py")
        for is_separator, command in itertools.groupby(words, lambda word: word == "then"):
            if not is_separator:
                sys.argv = [program, *command]
                cli_evaluate()
            elif os.environ.get("RANK", "0") == "0":
                os.write(
                    sys.stderr.fileno(), f"\n{SEPARATOR}\n".encode()
                )  # one write: the other rank writes there, too
