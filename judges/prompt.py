"""Prompts: versioned files with a slot for question, gold answer and answer, filled so that no text can speak as them.

A prompt file may begin with a YAML block between two lines ``---``:

- ``name``, ``version``: what it is called in results;
- ``labels``: letter -> ``correct`` or ``incorrect``, the closed set of replies (default A correct, B incorrect);
- ``quoting``: ``json`` (default) writes the texts as JSON strings, ``raw`` as they are, for a published wording that
  does so; answers can then imitate the rest of the prompt;
- ``system``: a system message; without one none is sent.

The rest is the user message, with ``{question}``, ``{gold}`` and ``{answer}`` at least once. Other braces are text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from judges.base import LABELS, Item

FOLDER = Path(__file__).parent / "prompts"


QUOTING = ("json", "raw")


HEADER_KEYS = ("name", "version", "labels", "quoting", "system")


DEFAULT_LABELS = {"A": "correct", "B": "incorrect"}


_SLOT = re.compile(r"\{(question|gold|answer)\}")


# Marks with a meaning in chat templates and markup; escaped in JSON strings, so that no special token can arise.
_MARKS = frozenset("<>[]{}|`")


Chat = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A judge's prompt.

    Args:
        name: name and version, for results.
        body: the user message with its slots.
        labels: letter -> label.
        quoting: one of :data:`QUOTING`.
        system: the system message, or ``None``.
    """

    name: str
    body: str
    labels: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_LABELS))
    quoting: str = "json"
    system: str | None = None

    def __post_init__(self) -> None:
        missing = {"question", "gold", "answer"} - set(_SLOT.findall(self.body))
        if missing:
            slots = ", ".join(f"{{{slot}}}" for slot in sorted(missing))
            raise EditingError(f"judge prompt {self.name!r} has no {slots}; question, gold and answer are all needed.")
        if self.quoting not in QUOTING:
            raise EditingError(f"judge prompt {self.name!r}: quoting={self.quoting!r}. Accepted: {', '.join(QUOTING)}.")
        if sorted(set(self.labels.values())) != sorted(LABELS) or not all(
            isinstance(letter, str) and letter.isalnum() for letter in self.labels
        ):
            raise EditingError(
                f"judge prompt {self.name!r}: labels={dict(self.labels)!r}; give words for exactly "
                f"{' and '.join(LABELS)}, such as {DEFAULT_LABELS!r}."
            )

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that reaches the judge or decides how its reply is read."""
        parts = [self.body, dict(sorted(self.labels.items())), self.quoting, self.system]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()

    def chat(self, item: Item) -> Chat:
        """The messages for one item. All slots are filled in one pass: a text that looks like a slot stays a text."""
        texts = {"question": item.question, "gold": item.gold, "answer": item.answer}
        quoted = {slot: quote(text) if self.quoting == "json" else text for slot, text in texts.items()}
        messages = [{"role": "user", "content": _SLOT.sub(lambda found: quoted[found[1]], self.body)}]
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]


def quote(text: str) -> str:
    """A JSON string on one line: quotes, markup, line breaks and invisible characters are escaped; lossless.

    ``json.loads(quote(text)) == text`` for every text, and nothing inside can end the string, begin a new line or form
    a special token of a chat template.
    """
    return "".join(_escaped(character) for character in json.dumps(text, ensure_ascii=False))


def _escaped(character: str) -> str:
    if not character.isprintable():  # controls, line ends, marks of direction, odd spaces
        return json.dumps(character)[1:-1]
    return f"\\u{ord(character):04x}" if character in _MARKS else character


def load_prompt(name: str) -> Prompt:
    """A shipped prompt by name, or the user's own by path.

    Raises:
        EditingError: for an unknown name, an unreadable file, a wrong header or missing slots.
    """
    shipped = {path.stem: path for path in sorted(FOLDER.glob("*.txt"))}
    path = shipped.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise EditingError(
            f"there is no judge prompt {name!r}.{near_misses(name, shipped)} Shipped: {', '.join(shipped)}; "
            "or give the path of a text file of your own."
        )
    try:
        return _parse(path.stem, path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise EditingError(f"judge prompt {path} cannot be read: {' '.join(str(error).split())}") from error


def _parse(stem: str, text: str) -> Prompt:
    header, body = _split(text)
    if unknown := set(header) - set(HEADER_KEYS):
        raise unknown_keys_error(f"key in the header of judge prompt {stem!r}:", unknown, HEADER_KEYS)
    name = f"{header['name']}_v{header['version']}" if {"name", "version"} <= set(header) else stem
    kept = {key: header[key] for key in ("labels", "quoting", "system") if key in header}
    return Prompt(name=name, body=body.strip("\n"), **kept)


def _split(text: str) -> tuple[dict[str, Any], str]:
    parts = re.match(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    if not parts:
        return {}, text
    header = yaml.safe_load(parts[1])
    if not isinstance(header, dict):
        raise EditingError("the header of a judge prompt is a YAML mapping between two lines of three dashes.")
    return header, parts[2]
