"""The terminal and the working folder that a command finds."""

from __future__ import annotations

import io
import os
import sys

from edit_hooks.utils.errors import EditingError


def accept_all_characters() -> None:
    """Let characters that the encoding of the output lacks be escaped, as Python does for standard error.

    Pipes on Windows, and terminals of other locales than UTF-8, have such encodings.
    """
    output = sys.stdout
    if isinstance(output, io.TextIOWrapper) and output.errors in ("strict", "surrogateescape"):
        output.reconfigure(errors="backslashreplace")


def check_working_folder() -> None:
    """Refuse a working folder that was removed: libraries of torch end the process for it, with a message of theirs.

    Raises:
        EditingError: as described.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise EditingError(
            f"the working folder cannot be found ({error.strerror}); it was removed or renamed. Change to another one."
        ) from None
