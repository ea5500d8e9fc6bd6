"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.yaml_io import read_yaml


def parse_checkpoints(value: object) -> tuple[int, ...]:
    """Numbers of edits from a list, a number, or ``10;100;1000`` (the harness splits model_args at commas)."""
    if value is None or value == "":
        return ()
    parts = value if isinstance(value, (list, tuple)) else str(value).replace(":", ";").split(";")
    try:
        numbers = tuple(int(str(part)) for part in parts)
    except ValueError:
        raise EditingError(f"checkpoints={value!r}; write numbers of edits as checkpoints=10;100;1000.") from None
    if any(number < 1 for number in numbers) or list(numbers) != sorted(set(numbers)):
        raise EditingError(f"checkpoints={value!r}; rising numbers of edits, each at least 1, are needed.")
    return numbers


def parse_editor_args(value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Editor settings from a mapping, the path of a YAML file, or inline ``name:value;name:value`` (or YAML in braces).

    The harness splits ``--model_args`` at commas, so inline settings are separated by semicolons:
    ``editor_args=layers:[5];lr:0.3``.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise EditingError(f"editor_args is {value!r}; a mapping, a YAML file or inline settings are accepted.")
    if Path(value).suffix in (".yaml", ".yml", ".json"):
        return read_yaml(value)
    text = value.strip().removeprefix("{").removesuffix("}")
    lines = [part.replace("=", ":", 1) if ":" not in part else part for part in text.split(";") if part.strip()]
    try:
        parsed = yaml.safe_load("\n".join(line.strip().replace(":", ": ", 1) for line in lines))
    except yaml.YAMLError as error:
        raise EditingError(f"editor_args={value!r} is not readable: {error}") from None
    if not isinstance(parsed, dict):
        raise EditingError(
            f"editor_args={value!r} is not readable; write editor_args=lr:0.3;num_steps:10 or name a YAML file."
        )
    return parsed


def choice(settings: Mapping[str, Any], key: str, accepted: Sequence[str], default: str) -> str:
    """A setting with a closed set of values."""
    value = settings.get(key, default)
    if value not in accepted:
        hint = near_misses(str(value), accepted)
        raise EditingError(f"{key}={value!r} is unknown.{hint} Accepted: {', '.join(accepted)}.")
    return str(value)


def switch(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    """A yes/no setting; strings from a command line are understood."""
    value = settings.get(key, default)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if not isinstance(value, bool):
        raise EditingError(f"{key}={value!r} is not a switch. Accepted: true, false.")
    return value
