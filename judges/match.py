"""String comparison of an answer with a gold answer, in any language.

Both texts are normalized as for SQuAD (:mod:`judges.squad`), with Unicode's notions of case, punctuation, digits and
equal characters. Scripts without spaces between words have no whole words, so every place counts there.

All functions look for the gold answer in the answer, never the reverse. A gold answer that normalizes to the empty
string (such as ``")"``) matches no answer; otherwise an empty answer would be correct.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence

from edit_hooks.utils.text.scripts import is_latin, writes_spaces
from judges.squad import ARTICLES, PUNCTUATION, squad_normalize

SHORT = 3  # letters; a name of at most this length occurs inside unrelated words

# Signs that stand for ASCII marks, which normalization deletes: apostrophes, quotes, hyphens and the like. All other
# punctuation separates words.
_LIKE_ASCII = frozenset("\u00b4\u02b9\u02bb\u02bc\u2032\u2033\u2212\u055a\u05f3\u05f4\u00b7\u2027\uff3f\u203f\u2040")
_SEPARATING_DASHES = frozenset("\u2014\u2015\u2e3a\u2e3b")
# Marks inside of a number, which end a clause elsewhere: full-width comma, hyphen, period, slash and colon, Arabic ones
_IN_NUMBER = re.compile(r"(?<=\d)[\uff0c\uff0d\uff0e\uff0f\uff1a\u066b\u066c](?=\d)")
# Deleted: vowel and reading marks that Arabic, Persian, Urdu and Hebrew texts write or leave out, and the stroke that
# widens a word. Equal: Arabic yeh and kaf, typed in place of the Persian and Urdu ones.
_OPTIONAL_MARKS = (*range(0x64B, 0x653), 0x670, 0x640, *range(0x591, 0x5BE), 0x5BF, 0x5C1, 0x5C2, 0x5C7)
_SEMITIC: dict[int, int | None] = {**dict.fromkeys(_OPTIONAL_MARKS), 0x64A: 0x6CC, 0x643: 0x6A9}
_KEPT_FORMS = ("<super>", "<fraction>")  # 10 to the power of 2 is not 102
# Korean attaches particles and the copula to a name.
_KOREAN_ENDING = re.compile(
    "(?:은|는|이|가|을|를|의|에|에서|에게|와|과|로|으로|도|만|까지|부터)?"
    "(?:라고|이라고|다|이다|입니다|이며|이고|였다|이었다|요|예요|이에요)?"
)


def normalize(text: str, *, keep_case: bool = False) -> str:
    """Fold case and equal characters, delete punctuation and articles, collapse white space.

    On ASCII text it is :func:`judges.squad.squad_normalize`. Beyond that, punctuation is that of every script; digits,
    full-width and other compatibility forms are their plain characters; accents stay, and the vowel marks do not that
    Arabic and Hebrew texts may leave out; *a*, *an* and *the* are articles only in texts whose letters are all Latin; a
    space beside a letter of a script without spaces does not count as one.

    Args:
        keep_case: leave the case as it is.
    """
    if text.isascii():
        return squad_normalize(text, keep_case=keep_case)
    text = _IN_NUMBER.sub("", unicodedata.normalize("NFC", text))
    text = unicodedata.normalize("NFC", "".join(map(_plain, text)).translate(_SEMITIC))
    if not keep_case:
        text = unicodedata.normalize("NFC", _fold_case(text))
    text = text.translate(PUNCTUATION)
    return _join((ARTICLES.sub(" ", text) if is_latin(text) else text).split())


def words(text: str) -> list[str]:
    """The words of a text after normalization; each letter of a script without spaces is one."""
    found: list[str] = []
    for word in normalize(text).split():
        start = len(found)
        for character in word:
            is_mark = unicodedata.category(character)[0] == "M"
            joins = len(found) > start and (is_mark or not (_is_unspaced(character) or _is_unspaced(found[-1][0])))
            if joins:
                found[-1] += character
            else:
                found.append(character)
    return found


def is_short(name: str) -> bool:
    """Whether a name is so short that it occurs inside unrelated words; none is in a script without spaces."""
    normalized = normalize(name)
    return not any(map(_is_unspaced, normalized)) and _num_letters(normalized) <= SHORT


def exact_match(answer: str, gold: str) -> bool:
    """Return whether both texts are equal after :func:`normalize`."""
    normalized_gold = normalize(gold)
    return bool(normalized_gold) and normalize(answer) == normalized_gold


def any_exact_match(answer: str, golds: Iterable[str]) -> bool:
    """Return whether the answer matches one of the accepted texts (a gold answer and its aliases)."""
    return any(exact_match(answer, gold) for gold in golds)


def alias_match(answer: str, golds: Iterable[str], *, keep_case: bool = False) -> bool:
    """Return whether one of the accepted texts occurs in the answer as consecutive whole words."""
    normalized = normalize(answer, keep_case=keep_case)
    return any(_occurs(normalize(gold, keep_case=keep_case), normalized, whole_words=True) for gold in golds)


def contains(answer: str, gold: str, *, whole_words_up_to: int = SHORT) -> bool:
    """Return whether the answer contains the gold answer, also inside a longer word.

    Args:
        whole_words_up_to: gold answers of at most this many letters must be whole words ("Ur" occurs in "hour").
    """
    normalized_gold = normalize(gold)
    whole_words = _num_letters(normalized_gold) <= whole_words_up_to
    return _occurs(normalized_gold, normalize(answer), whole_words=whole_words)


def has_answer(text: str, names: Sequence[str], *, whole_words: bool = False) -> bool:
    """Return whether a text contains an answer, given this and its other names.

    Other names of up to three letters, without articles and punctuation, must be whole words in their own case: "the
    US" and "U.S." are names of the USA, and would be found in "let us look" without it.

    Args:
        names: the answer, then its other names.
        whole_words: longer names must be whole words, too.
    """
    for number, name in enumerate(names):
        if whole_words or is_short(name):
            if alias_match(text, [name], keep_case=is_short(name) and number > 0):
                return True
        elif contains(text, name):
            return True
    return False


def match_ratio(answer: str, gold: str) -> float:
    """Share of the gold answer's words at the same position in the answer (the text form of AR-MATCH), in 0..1.

    Words beyond the gold answer's length are ignored, as in the protocol: continuations, repetitions and contradictions
    do not change the score.
    """
    gold_words, answer_words = words(gold), words(answer)
    if not gold_words:
        return 0.0
    return sum(a == b for a, b in zip(gold_words, answer_words, strict=False)) / len(gold_words)


@functools.lru_cache(maxsize=1 << 14)
def _plain(character: str) -> str:
    """The plain form of a character; a space for punctuation without an ASCII counterpart that is deleted."""
    category = unicodedata.category(character)
    if character in _LIKE_ASCII or category in ("Cf", "Pi", "Pf"):  # invisible characters, quotes
        return ""
    if category == "Pd" and character not in _SEPARATING_DASHES:
        return ""
    if category[0] == "P" and not character.isascii():
        return " "
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if unicodedata.decomposition(character).startswith(_KEPT_FORMS):
        return character
    return unicodedata.normalize("NFKC", character)


def _fold_case(text: str) -> str:
    return (
        text.casefold().replace("i\u0307", "i").replace("\u0131", "i")
    )  # Turkish writes both of i without and with a dot


def _join(parts: Sequence[str]) -> str:
    """Join parts by spaces, but not beside letters of scripts without them."""
    text = ""
    for part in parts:
        is_spaced = text and not (_is_unspaced(text[-1]) or _is_unspaced(part[0]))
        text += f" {part}" if is_spaced else part
    return text


def _occurs(name: str, text: str, *, whole_words: bool) -> bool:
    """Whether a normalized name occurs in a normalized text; the empty one does not."""
    if not name or name not in text:
        return False
    start = text.find(name)
    while start >= 0:
        if _is_match(name, text, start, whole_words=whole_words):
            return True
        start = text.find(name, start + 1)
    return False


def _is_match(name: str, text: str, start: int, *, whole_words: bool) -> bool:
    before, after = text[start - 1 : start], text[start + len(name) :]
    if after and unicodedata.category(after[0])[0] == "M":
        return False  # a mark belongs to the letter before it: the text has another letter there
    if not whole_words:
        return True
    return _is_edge(before, name[0]) and (_is_edge(after[:1], name[-1]) or _is_ending(name, after))


def _is_edge(outside: str, inside: str) -> bool:
    """Whether a word can end between two characters; outside is empty at the end of the text."""
    return outside in ("", " ") or _is_unspaced(outside) or _is_unspaced(inside)


def _is_ending(name: str, after: str) -> bool:
    return _is_hangul(name[-1]) and bool(_KOREAN_ENDING.fullmatch(after.partition(" ")[0]))


def _num_letters(text: str) -> int:
    """Length of a text; a Korean syllable has two or three letters."""
    return sum(len(unicodedata.normalize("NFD", one)) if _is_hangul(one) else 1 for one in text)


def _is_hangul(character: str) -> bool:
    return "\uac00" <= character <= "\ud7a3"


def _is_unspaced(character: str) -> bool:
    return not character.isascii() and writes_spaces(character) is False
