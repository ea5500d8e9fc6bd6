"""The command ``lm_eval``: braces in its options, and user errors as one message without a traceback."""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any


def allow_braces(utils: ModuleType) -> None:
    """Let options such as ``--model_args`` hold a brace; only a text that begins with one is JSON."""
    original = utils.try_parse_json
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def try_parse_json(value: Any) -> Any:
        try:
            return original(value)
        except ValueError:
            if not isinstance(value, str) or value.lstrip().startswith("{"):
                raise
            return value

    vars(try_parse_json)["_lm_eval_editing"] = True
    vars(utils)["try_parse_json"] = try_parse_json


def print_user_errors(cli: ModuleType) -> None:
    """Let the command ``lm_eval`` end with the message of an ``EditingError``."""
    original = cli.HarnessCLI.execute
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            from edit_hooks.utils.errors import EXIT_CODE, EditingError, traceback_wanted

            if not isinstance(error, EditingError) or traceback_wanted():
                raise
            rank = os.environ.get("RANK", "0")
            print(f"lm_eval{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
            raise SystemExit(EXIT_CODE) from None

    vars(execute)["_lm_eval_editing"] = True
    cli.HarnessCLI.execute = execute
