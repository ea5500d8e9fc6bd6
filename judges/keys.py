"""API keys at places where none belongs, such as the name of a model: settings are printed and written to results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from edit_hooks.utils.errors import EditingError

# How the keys of common providers begin; none of these is a part of a model's name or of an address.
_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:[srp]k-[\w-]{16,}|(?:hf|gsk|ghp|nvapi|xai|pplx|csk)[_-][A-Za-z0-9]{20,}|AIza[\w-]{30,}"
    r"|Bearer\s+\S{16,})"
)
_KEY_VARIABLE = re.compile(r"(?:.*_)?API_KEY|HF_TOKEN|HUGGING_FACE_HUB_TOKEN")
SHORTEST_KEY = 12  # characters; shorter values of such variables are placeholders for servers without keys


def refuse_keys(what: str, value: object) -> None:
    """Refuse a text that holds an API key, and a mapping or list with one at any depth.

    Args:
        what: name of the value in the message, which does not repeat it.

    Raises:
        EditingError: for a value of an environment variable with a key, and for what looks like one.
    """
    keys = [key.strip() for name, key in os.environ.items() if _KEY_VARIABLE.fullmatch(name)]
    keys = [key for key in keys if len(key) >= SHORTEST_KEY]
    for text in _texts(value):
        if _KEY.search(text) or any(key in text for key in keys):
            raise EditingError(
                f"{what} holds an API key, or looks as if it did. Keys are read from the environment only, because "
                "settings are printed and written to results: put it into OPENAI_API_KEY, or into the variable that "
                "api_key_env names. If it was typed on a command line, the shell's history has it as well."
            )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _texts(name)
            yield from _texts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)
