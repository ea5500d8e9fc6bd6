"""One line on standard error for what could not be extended; an import of lm-eval never fails for it."""

from __future__ import annotations

import sys

SWITCH = "LM_EVAL_EDITING_AUTOLOAD"


def report(failure: str, error: BaseException) -> None:
    """Print what failed, and how to disable the start-up hook."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"lm-eval-editing: {failure}: {reason} ({SWITCH}=0 switches this off)", file=sys.stderr)
