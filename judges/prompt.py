"""Judge prompts: versioned files with slots for question, gold answer and answer.

The texts are quoted on insertion, so none of them can imitate a part of the prompt. A prompt file may begin with a YAML
header between two lines ``---``:

- ``name``, ``version``: the prompt's name in results;
- ``labels``: letter -> ``correct`` or ``incorrect``, the closed set of replies (default: A correct, B incorrect);
- ``quoting``: ``json`` (default) inserts the texts as JSON strings; ``raw`` inserts them verbatim, for a published
  wording that does so, and lets an answer imitate the prompt;
- ``system``: the system message; none is sent without it.

The rest of the file is the user message. It contains ``{question}``, ``{gold}`` and ``{answer}`` at least once each;
other braces are plain text. A single name in braces that is neither a slot nor a label is probably meant as a slot: it
is named in a warning, as are slots in the system message, which are not filled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import read_text, user_path
from edit_hooks.utils.storage.yaml_io import parse_yaml
from judges import published_wording
from judges.base import LABELS, Item

log = get_logger("lm_eval.judges")

PROMPT_FOLDER = Path(__file__).parent / "prompts"
QUOTING = ("json", "raw")
HEADER_KEYS = ("name", "version", "labels", "quoting", "system")
DEFAULT_LABELS = {"A": "correct", "B": "incorrect"}

_SLOT = re.compile(r"\{(question|gold|answer)\}")
_NAME_IN_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")
_HEADER_AND_BODY = re.compile(r"---\n(?P<header>.*?)\n---\n(?P<body>.*)", re.DOTALL)

# Characters of chat templates and markup. Escaped in JSON strings, so that no special token can arise.
_MARKUP = frozenset("<>[]{}|`")

Chat = list[dict[str, str]]
CHARACTERS_PER_TOKEN = 4  # rule of thumb for English, precise enough for a budget


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A judge prompt.

    Args:
        name: name with version, for results.
        body: the user message with its slots.
        labels: letter -> label.
        quoting: one of :data:`QUOTING`.
        system: the system message, or ``None``.

    Raises:
        EditingError: for missing slots and for labels, quoting or a system message that are not as described.
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
        if not _are_labels(self.labels):
            raise EditingError(
                f"judge prompt {self.name!r}: labels={self.labels!r}; give words for exactly "
                f"{' and '.join(LABELS)}, such as {DEFAULT_LABELS!r}."
            )
        if not isinstance(self.system, (str, type(None))):
            raise EditingError(f"judge prompt {self.name!r}: system={self.system!r} is not a text; put it in quotes.")

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that the judge model sees or that decides how its reply is parsed."""
        parts = [self.body, dict(sorted(self.labels.items())), self.quoting, self.system]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()

    def chat(self, item: Item) -> Chat:
        """Return the messages for one item.

        All slots are filled in one pass, so a text that looks like a slot stays a text.
        """
        texts = {"question": item.question, "gold": item.gold, "answer": item.answer}
        quoted = {slot: quote(text) if self.quoting == "json" else text for slot, text in texts.items()}
        messages = [{"role": "user", "content": _SLOT.sub(lambda slot: quoted[slot[1]], self.body)}]
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]


def _are_labels(labels: object) -> bool:
    if not isinstance(labels, Mapping) or not all(isinstance(word, str) and word.isalnum() for word in labels):
        return False
    return set(map(str, labels.values())) == set(LABELS)


def estimate_tokens(chat: Chat) -> int:
    """Estimate the tokens of a chat from its characters."""
    return math.ceil(sum(len(message["content"]) for message in chat) / CHARACTERS_PER_TOKEN)


def quote(text: str) -> str:
    """Return a JSON string on one line; quotes, markup, line breaks and invisible characters are escaped.

    ``json.loads(quote(text)) == text`` for every text. No text can end the string, begin a new line or form a special
    token of a chat template.
    """
    return "".join(_escape_character(character) for character in json.dumps(text, ensure_ascii=False))


def _escape_character(character: str) -> str:
    if not character.isprintable():  # control characters, line separators, direction marks, unusual spaces
        return json.dumps(character)[1:-1]
    return f"\\u{ord(character):04x}" if character in _MARKUP else character


def load_prompt(name: str) -> Prompt:
    """Load a shipped prompt by name, the published wording of WILD, or a user's prompt by path.

    Raises:
        EditingError: for an unknown name, an unreadable file, an invalid header or missing slots, and for a published
            wording that cannot be downloaded.
    """
    if name == published_wording.NAME:
        return Prompt(name=name, body=published_wording.fetch_published_wording(), quoting="raw")
    shipped = {path.stem: path for path in sorted(PROMPT_FOLDER.glob("*.txt"))}
    path = shipped.get(name) or user_path(name, "judge prompt")
    if not path.is_file():
        raise EditingError(
            f"there is no judge prompt {name!r}.{near_misses(name, [*shipped, published_wording.NAME])} "
            f"Shipped: {', '.join(shipped)}; downloaded: {published_wording.NAME}; or give the path of a text file."
        )
    return _parse_prompt(path.stem, read_text(path, "judge prompt"))


def _parse_prompt(stem: str, text: str) -> Prompt:
    header, body = _split_header(text)
    if unknown := set(header) - set(HEADER_KEYS):
        raise unknown_keys_error(f"key in the header of judge prompt {stem!r}:", map(str, unknown), HEADER_KEYS)
    name = f"{header['name']}_v{header['version']}" if {"name", "version"} <= set(header) else stem
    options = {key: header[key] for key in ("labels", "quoting", "system") if key in header}
    prompt = Prompt(name=name, body=body.strip("\n"), **options)
    unfilled = [_SLOT.sub("", prompt.body), prompt.system or ""]
    found = {name for text in unfilled for name in _NAME_IN_BRACES.findall(text)}
    if names := sorted(found - set(prompt.labels)):
        _warn_of_unfilled(name, ", ".join(f"{{{each}}}" for each in names))
    return prompt


@functools.cache  # a prompt is loaded for every task
def _warn_of_unfilled(name: str, unfilled: str) -> None:
    log.warning(
        "judge prompt %s: the judge reads %s as it stands. Only {question}, {gold} and {answer} are filled, in the "
        "user message.",
        name,
        unfilled,
    )


def _split_header(text: str) -> tuple[dict[str, Any], str]:
    parts = _HEADER_AND_BODY.match(text)
    if not parts:
        return {}, text
    try:
        header = parse_yaml(parts["header"])
    except ValueError as error:
        raise EditingError(f"the header of the judge prompt is not valid YAML: {error}.") from None
    if not isinstance(header, dict):
        raise EditingError("the header of a judge prompt is a YAML mapping between two lines of three dashes.")
    return header, parts["body"]
