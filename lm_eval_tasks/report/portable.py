"""Values of a result file without folders and secrets of the machine that wrote it, and numbers by their value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from edit_hooks.utils.settings.options import SECRET_OPTIONS

# Arguments that files of other model classes may have, and of `edited_hf` from before it refused them.
SECRETS = (*SECRET_OPTIONS, "api_key")

EXACT = 2.0**53  # whole numbers below are exact as floating-point numbers

_ABSOLUTE = re.compile(r"(?:~|/|[A-Za-z]:[\\/])[^\n]*[/\\][^\n/\\]+$")


def portable(value: Any) -> Any:
    """The value without folders and secrets of this machine: absolute paths inside it are cut to their last name."""
    if isinstance(value, Mapping):
        return {key: portable(entry) for key, entry in value.items() if key not in SECRETS}
    if isinstance(value, (list, tuple)):
        return [portable(entry) for entry in value]
    return PurePath(value).name if isinstance(value, str) and _ABSOLUTE.match(value) else value


def by_value(value: Any) -> Any:
    """The value with whole numbers in one form: 3.0, as ``--limit 3`` is parsed, is 3."""
    if isinstance(value, Mapping):
        return {key: by_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [by_value(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT else value
