"""Scripts of texts: which write spaces between words, and how they end a sentence.

Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan and their relatives write none between words; Korean and all
others do. Characters are classified by their Unicode properties, so no table of ranges is needed.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable

from edit_hooks.utils.logs import warn_once

# First words of the Unicode names of letters without spaces between words, besides those of East Asian width.
_UNSPACED = frozenset({"THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "TAI", "NEW", "AHOM"})
# Marks that end a statement: the ASCII period, and those of other scripts
PERIODS = (".", "\u3002", "\uff0e", "\uff61", "\u0964", "\u06d4", "\u0589", "\u1362", "\u17d4", "\u104b", "\u0f0d")
_DANDA = ("\u0964", "\u0965")
# Script -> the marks that end a sentence, as the ASCII period does in English. Thai and Lao have none.
_SENTENCE_ENDS: dict[str, tuple[str, ...]] = {
    "CJK": ("\u3002", "\uff01", "\uff1f", "\uff0e", "\uff61"),
    **dict.fromkeys(("DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA"), _DANDA),
    "ARABIC": ("\u061f", "\u06d4"),
    "ARMENIAN": ("\u0589",),
    "ETHIOPIC": ("\u1362", "\u1367"),
    "KHMER": ("\u17d4", "\u17d5"),
    "MYANMAR": ("\u104b",),
    "TIBETAN": ("\u0f0d",),
}
# Marks that end a sentence of any script.
ENDS = (".", "!", "?", *dict.fromkeys(mark for marks in _SENTENCE_ENDS.values() for mark in marks))


def separator_between(prompt: str, target: str) -> str:
    """The white space that joins a prompt and its continuation: one space, or nothing.

    The scripts on both sides decide. Where they differ, the prompt decides by the way it joins such scripts itself
    (``OpenAI的CEO是`` without a space, ``The capital of 法国 is`` with one). Nothing joins texts of which one has white
    space there already.
    """
    if prompt[-1:].isspace() or target[:1].isspace():
        return ""
    before, after = _first(reversed(prompt)), _first(target)
    if before is None or after is None:
        is_spaced = before is not False and after is not False
    elif before == after:
        is_spaced = before
    else:
        own = _joins_by_space(prompt)
        is_spaced = before if own is None else own
    return " " if is_spaced else ""


@functools.lru_cache(maxsize=1 << 14)
def writes_spaces(character: str) -> bool | None:
    """Whether the script of a letter has spaces between words; ``None`` for digits, symbols and neutral punctuation.

    Punctuation of East Asian width belongs to the scripts without them.
    """
    category, name = unicodedata.category(character)[0], unicodedata.name(character, "")
    if category in "LMNP" and "HANGUL" not in name:
        width = unicodedata.east_asian_width(character)
        if width in ("W", "F") or (width == "H" and category != "P"):
            return False
    if category in "LM" and name.partition(" ")[0] in _UNSPACED:
        return False
    return True if category == "L" else None


def mention_of(name: str) -> re.Pattern[str]:
    """Return a pattern that finds a name as whole words; in scripts without spaces between words, anywhere."""
    before = "" if name and writes_spaces(name[0]) is False else r"(?<!\w)"
    after = "" if name and writes_spaces(name[-1]) is False else r"(?!\w)"
    return re.compile(before + re.escape(name) + after)


def sentence_ends(texts: Iterable[str]) -> tuple[str, ...]:
    """The marks that end a sentence in the scripts of some texts, besides the ASCII period."""
    scripts = dict.fromkeys(script for text in texts for script in map(_script, text) if script in _SENTENCE_ENDS)
    return tuple(dict.fromkeys(mark for script in scripts for mark in _SENTENCE_ENDS[script]))


def is_latin(text: str) -> bool:
    """Whether at least half of a text's letters are Latin, as in English; true without letters."""
    if text.isascii():
        return True
    letters = [_script(character) == "LATIN" for character in text if character.isalpha()]
    return 2 * sum(letters) >= len(letters)


def warn_of_english_rule(logger: logging.Logger, rule: str, texts: Iterable[str], remedy: str) -> None:
    """Log once per rule that a rule made for English meets a text of another script.

    Args:
        rule: as the subject of a sentence.
        remedy: a sentence.
    """
    if (other := next((text for text in texts if not is_latin(text)), None)) is not None:
        message = "%s: made for English, and here applied to texts of another script (first %r). %s"
        warn_once(logger, ("English rule", rule), message, rule, other, remedy)


@functools.lru_cache(maxsize=1 << 14)
def _script(character: str) -> str:
    """A key of :data:`_SENTENCE_ENDS` or the first word of a letter's Unicode name; empty for other characters."""
    if unicodedata.category(character)[0] not in "LM":
        return ""
    word = unicodedata.name(character, "").partition(" ")[0]
    return "CJK" if writes_spaces(character) is False and word not in _UNSPACED else word


def _first(characters: Iterable[str]) -> bool | None:
    """Whether the first letter of a text is of a script with spaces; ``None`` without a letter."""
    return next((known for known in map(writes_spaces, characters) if known is not None), None)


def _joins_by_space(text: str) -> bool | None:
    """Whether white space stands where scripts with and without spaces meet last; ``None`` if they do not meet."""
    found, last, has_space = None, None, False
    for character in text:
        known = writes_spaces(character)
        if known is None:
            has_space = has_space or character.isspace()
            continue
        if last is not None and known != last:
            found = has_space
        last, has_space = known, False
    return found


def near_occurrence(words: str, text: str) -> str:
    """A clause about words that a text has in another spelling, for an error that they do not occur; else ``""``."""
    if _occurs(words, text, lambda part: unicodedata.normalize("NFC", part)):
        return "they differ in Unicode form (an accent in one character or in two: write both in NFC); "
    if _occurs(words, text, lambda part: " ".join(part.split())):
        return "they differ in white space; "
    return "they differ in upper and lower case; " if _occurs(words, text, str.casefold) else ""


def _occurs(words: str, text: str, spelled: Callable[[str], str]) -> bool:
    return spelled(words) in spelled(text)


def invisible_characters(text: str) -> list[str]:
    """The control and format characters of a text, as ``U+200B ZERO WIDTH SPACE``, each once.

    Line breaks, tabs, and the joiners of emoji and of Indic and Persian words are left out.
    """
    found = dict.fromkeys(
        character
        for character in text
        if unicodedata.category(character) in ("Cc", "Cf") and character not in "\n\t\r\u200c\u200d"
    )
    return [f"U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip() for character in found]
