"""SQuAD's exact match, as the papers compute it whose columns carry it. It is made for English.

It deletes ASCII punctuation alone and the articles of English. :mod:`judges.match` has the same rule for every
language; on ASCII both are equal.
"""

from __future__ import annotations

import re
import string

from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.text.scripts import warn_of_english_rule

log = get_logger("lm_eval.judges")

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)


def squad_normalize(text: str, *, keep_case: bool = False) -> str:
    """Lower-case, delete ASCII punctuation, blank out a/an/the, collapse white space.

    The order matters: punctuation is deleted before articles, so ``"a-ha"`` becomes ``"aha"`` and keeps its ``a``.

    Args:
        keep_case: all but the first step.
    """
    text = text if keep_case else text.lower()
    return " ".join(ARTICLES.sub(" ", text.translate(PUNCTUATION)).split())


def squad_match(answer: str, gold: str) -> bool:
    """Return whether both texts are equal after :func:`squad_normalize`; a warning names other scripts, once."""
    remedy = "Right answers can fail it; read *_contains or *_judge instead."
    warn_of_english_rule(log, "SQuAD's exact match, as published (*_wild_em, *_ar_em, *_tf_em)", [gold], remedy)
    normalized_gold = squad_normalize(gold)
    return bool(normalized_gold) and squad_normalize(answer) == normalized_gold
