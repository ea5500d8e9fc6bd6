"""Parsing of options: numbers of edits, editor settings, choices and switches."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, require_number, require_numbers, require_whole, shorten
from edit_hooks.utils.storage.yaml_io import parse_yaml, read_yaml

# Model options that hold a secret; lm-eval prints and saves all model options.
SECRET_OPTIONS = ("token", "use_auth_token")

# ``name:`` or ``name=``; a single letter before ``:\`` or ``:/`` is the drive of a Windows path.
_PLAIN = re.compile(r"[A-Za-z][\w.-]*")  # a text that needs no quotes
_SETTING = re.compile(r"\s*([A-Za-z_]\w+|[A-Za-z_](?=\s*[:=](?![\\/])))\s*[:=]\s*")


def parse_checkpoints(value: object) -> tuple[int, ...]:
    """Parse numbers of edits: a list, a number, or text such as ``10;100;1000``.

    Raises:
        EditingError: unless the numbers are ascending and positive.
    """
    if value is None or value == "":
        return ()
    parts = value if isinstance(value, (list, tuple)) else str(value).replace(":", ";").split(";")
    try:
        numbers = tuple(int(str(part)) for part in parts)
    except ValueError:
        raise EditingError(f"checkpoints={value!r}; write numbers of edits as checkpoints=10;100;1000.") from None
    if any(number < 1 for number in numbers) or list(numbers) != sorted(set(numbers)):
        raise EditingError(f"checkpoints={value!r}; ascending numbers of edits, each at least 1, are needed.")
    return numbers


def settings_file(value: object) -> str | None:
    """The path in ``editor_args`` if it names a file; ``None`` for inline settings."""
    text = value.strip() if isinstance(value, str) else ""
    in_braces = text.startswith("{") and text.endswith("}")
    is_file = not in_braces and Path(text).suffix in (".yaml", ".yml", ".json") and not _SETTING.match(text)
    return text if is_file else None


def parse_editor_args(value: Mapping[str, Any] | str | None, option: str = "editor_args") -> dict[str, Any]:
    """Parse editor settings from a mapping or a text.

    A text is the path of a YAML file, ``name:value;name:value``, or YAML in braces. Inline settings are separated by
    semicolons, because lm-eval splits ``--model_args`` at commas: ``editor_args=layers:[5];lr:0.3``.

    Args:
        option: name of the option in error messages.

    Raises:
        EditingError: for anything else.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise EditingError(f"{option} is {value!r}; a mapping, a YAML file or inline settings are accepted.")
    text = value.strip()
    if (file := settings_file(text)) is not None:
        return read_yaml(file)
    in_braces = text.startswith("{") and text.endswith("}")
    parts = (text[1:-1] if in_braces else text).split(";")
    settings = [_SETTING.sub(r"\1: ", part, count=1).strip() for part in parts if part.strip()]
    try:
        parsed = parse_yaml("{" + ", ".join(settings) + "}" if in_braces else "\n".join(settings))
    except ValueError as error:
        raise EditingError(f"{option}={value!r} is not readable: {error}") from None
    if not isinstance(parsed, dict):
        raise EditingError(
            f"{option}={value!r} is not readable; write {option}=lr:0.3;num_steps:10 or name a YAML file."
        )
    return parsed


def inline_settings(settings: Mapping[str, Any]) -> str:
    """The text of settings that :func:`parse_editor_args` reads back, as ``name:value;name:value``.

    Raises:
        ValueError: for a value without a text form, see :func:`has_text_form`.
    """
    return ";".join(f"{name}:{_inline(value)}" for name, value in settings.items())


def has_text_form(value: object) -> bool:
    """Whether a setting can be written inline: ``None``, switches, numbers, texts, and lists and mappings of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and has_text_form(entry) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(has_text_form, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _inline(value: object) -> str:
    """A value as YAML of one line without a semicolon, which separates settings."""
    if not has_text_form(value):
        raise ValueError(f"{shorten(value)} has no text form")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_inline(key)}: {_inline(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and parse_yaml(value) == value else _quoted(value)
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "null"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    text = repr(float(value)) if isinstance(value, float) else str(value)  # numpy's numbers have another repr
    return text.replace("e", ".0e") if "e" in text and "." not in text else text  # YAML reads 1e-06 as text


def _quoted(text: str) -> str:
    """A text in YAML's double quotes."""
    escaped = (one if one.isprintable() and one not in ';"\\' else _escaped(one) for one in text)
    return f'"{"".join(escaped)}"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\U{code:08x}"


# lm-eval's names of the longest generation
MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def check_generation_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Check ``generation_kwargs`` of a task, into which lm-eval merges ``--gen_kwargs``.

    Raises:
        EditingError: for a length below one, stop strings that are no texts, and numbers that are not finite.
    """
    for name, value in kwargs.items():
        what = f"generation setting {name!r}"
        if name in MAX_TOKENS_NAMES:
            require_whole(what, value)
        elif name == "until":
            stops = [value] if isinstance(value, str) else value
            if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
                raise EditingError(f"{what} is {shorten(value)}; a text or a list of texts is needed.")
        elif name == "temperature":
            require_number(what, value, NON_NEGATIVE)
        elif name == "do_sample":
            switch(kwargs, name, False)
        else:
            require_numbers(what, value)


def choice(settings: Mapping[str, Any], key: str, accepted: Sequence[str], default: str) -> str:
    """Return a setting with a closed set of values.

    Raises:
        EditingError: for other values, with near misses.
    """
    value = settings.get(key, default)
    if value not in accepted:
        hint = near_misses(str(value), accepted)
        raise EditingError(f"{key}={value!r} is unknown.{hint} Accepted: {', '.join(accepted)}.")
    return str(value)


def switch(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean setting; the texts ``true`` and ``false`` are accepted.

    Raises:
        EditingError: for other values.
    """
    value = settings.get(key, default)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if not isinstance(value, bool):
        raise EditingError(f"{key}={value!r} is not a switch. Accepted: true, false.")
    return value
