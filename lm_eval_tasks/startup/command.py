"""The command ``lm_eval``: braces in its options; user errors and Ctrl-C as one message without a traceback."""

from __future__ import annotations

import functools
import os
import signal
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
    """Let the command ``lm_eval`` end with the message of an ``EditingError``, and print in any encoding.

    With our model, Ctrl-C ends it with one line and exit code 130, as it ends ``lm-edit``.
    """
    original = cli.HarnessCLI.execute
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        from edit_hooks.utils.errors import EXIT_CODE, EditingError, ModelChangedError, traceback_wanted
        from edit_hooks.utils.terminal import accept_all_characters, check_working_folder

        rank = os.environ.get("RANK", "0")
        name = "lm_eval" if rank == "0" else f"lm_eval (rank {rank})"
        is_ours = getattr(args[0] if args else kwargs.get("args"), "model", None) == "edited_hf"
        accept_all_characters()
        try:
            if is_ours:
                check_working_folder()
            return original(self, *args, **kwargs)
        except (EditingError, ModelChangedError) as error:
            if traceback_wanted():
                raise
            print(f"{name}: {error}", file=sys.stderr)
            raise SystemExit(EXIT_CODE) from None
        except KeyboardInterrupt:
            if not is_ours or traceback_wanted():
                raise
            print(f"{name}: interrupted; the same command continues with the edits and answers stored", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None

    vars(execute)["_lm_eval_editing"] = True
    cli.HarnessCLI.execute = execute
