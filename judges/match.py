"""String comparison of an answer with a gold answer, after SQuAD's normalization.

All functions look for the gold answer in the answer, never the reverse. A gold answer that normalizes to the empty
string (such as ``")"``) matches no answer; otherwise an empty answer would be correct.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

SHORT = 3  # characters; a name of at most this length occurs inside unrelated words
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)


def normalize(text: str, *, keep_case: bool = False) -> str:
    """Lower-case, delete ASCII punctuation, blank out a/an/the, collapse white space.

    The order matters: punctuation is deleted before articles, so ``"a-ha"`` becomes ``"aha"`` and keeps its ``a``.

    Args:
        keep_case: all but the first step.
    """
    text = text if keep_case else text.lower()
    return " ".join(_ARTICLES.sub(" ", text.translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> bool:
    """Return whether both texts are equal after :func:`normalize`."""
    normalized_gold = normalize(gold)
    return bool(normalized_gold) and normalize(answer) == normalized_gold


def any_exact_match(answer: str, golds: Iterable[str]) -> bool:
    """Return whether the answer matches one of the accepted texts (a gold answer and its aliases)."""
    return any(exact_match(answer, gold) for gold in golds)


def alias_match(answer: str, golds: Iterable[str], *, keep_case: bool = False) -> bool:
    """Return whether one of the accepted texts occurs in the answer as consecutive whole words."""
    padded_answer = f" {normalize(answer, keep_case=keep_case)} "
    return any(f" {words} " in padded_answer for gold in golds if (words := normalize(gold, keep_case=keep_case)))


def contains(answer: str, gold: str, *, whole_words_up_to: int = SHORT) -> bool:
    """Return whether the answer contains the gold answer, also inside a longer word.

    Args:
        whole_words_up_to: gold answers of at most this many characters must be whole words ("Ur" occurs in "hour").
    """
    normalized_gold = normalize(gold)
    if not normalized_gold:
        return False
    if len(normalized_gold) <= whole_words_up_to:
        return alias_match(answer, [gold])
    return normalized_gold in normalize(answer)


def has_answer(text: str, names: Sequence[str], *, whole_words: bool = False) -> bool:
    """Return whether a text contains an answer, given this and its other names.

    Other names of up to three characters, without articles and punctuation, must be whole words in their own case: "the
    US" and "U.S." are names of the USA, and would be found in "let us look" without it.

    Args:
        names: the answer, then its other names.
        whole_words: longer names must be whole words, too.
    """
    for number, name in enumerate(names):
        is_short = len(normalize(name)) <= SHORT
        if whole_words or is_short:
            if alias_match(text, [name], keep_case=is_short and number > 0):
                return True
        elif contains(text, name):
            return True
    return False


def match_ratio(answer: str, gold: str) -> float:
    """Share of the gold answer's words at the same position in the answer (the text form of AR-MATCH), in 0..1.

    Words beyond the gold answer's length are ignored, as in the protocol: continuations, repetitions and contradictions
    do not change the score.
    """
    gold_words = normalize(gold).split()
    answer_words = normalize(answer).split()
    if not gold_words:
        return 0.0
    return sum(a == b for a, b in zip(gold_words, answer_words, strict=False)) / len(gold_words)
