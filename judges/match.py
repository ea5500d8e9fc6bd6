"""String comparison: exact match after the normalization that SQuAD's evaluation made common, and its relatives.

All functions compare in one direction, is the gold answer in the answer, and a gold text of which normalization leaves
nothing (such as ``")"``) matches no answer: otherwise saying nothing would be right.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)


_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Lower-case, delete ASCII punctuation, blank out the words a/an/the, collapse white space, in this order.

    The order matters: punctuation goes before articles, so ``"a-ha"`` becomes ``"aha"`` and keeps its ``a``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> bool:
    """True when both texts are equal after :func:`normalize`; an empty gold text matches nothing."""
    wanted = normalize(gold)
    return bool(wanted) and normalize(answer) == wanted


def any_exact_match(answer: str, golds: Iterable[str]) -> bool:
    """True when the answer matches one of the accepted texts (an answer and its aliases)."""
    return any(exact_match(answer, gold) for gold in golds)


def alias_match(answer: str, golds: Iterable[str]) -> bool:
    """True when one of the accepted texts occurs in the answer as whole words, one after the other."""
    said = f" {normalize(answer)} "
    return any(f" {wanted} " in said for gold in golds if (wanted := normalize(gold)))


def contains(answer: str, gold: str, *, whole_words_up_to: int = 3) -> bool:
    """True when the normalized answer contains the normalized gold text, also inside a longer word.

    Args:
        whole_words_up_to: gold texts of at most so many characters must be whole words: "Ur" is in every "hour".
    """
    wanted = normalize(gold)
    if not wanted:
        return False
    return alias_match(answer, [gold]) if len(wanted) <= whole_words_up_to else wanted in normalize(answer)


def match_ratio(answer: str, gold: str) -> float:
    """Share of the gold text's words that the answer has in the same place (the text form of AR-MATCH), in 0..1.

    What comes after as many words as the gold text has is not looked at: the score is blind to continuation,
    repetition and contradiction, as the protocol is.
    """
    wanted = normalize(gold).split()
    said = normalize(answer).split()
    return sum(a == b for a, b in zip(wanted, said, strict=False)) / len(wanted) if wanted else 0.0
