"""String judges: exact match after the normalisation that SQuAD's evaluation made common."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower-case, delete ASCII punctuation, blank out the words a/an/the, collapse white space, in this order.

    The order matters: punctuation goes before articles, so ``"a-ha"`` becomes ``"aha"`` and keeps its ``a``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> bool:
    """True when both texts are equal after :func:`normalise`.

    A gold text of which nothing is left (such as ``")"``) matches no answer: otherwise saying nothing would be right.
    """
    wanted = normalise(gold)
    return bool(wanted) and normalise(answer) == wanted


def any_exact_match(answer: str, golds: Iterable[str]) -> bool:
    """True when the answer matches one of the accepted texts (an answer and its aliases)."""
    return any(exact_match(answer, gold) for gold in golds)
