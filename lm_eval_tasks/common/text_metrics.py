"""Metrics of whole texts, from the evaluation of ROME and MEMIT.

They are n-gram entropy (fluency) and TF-IDF consistency.

The default tokens are those of :func:`words`; the published numbers need nltk's ``word_tokenize``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

Tokenizer: TypeAlias = Callable[[str], Sequence[str]]

_WORD = re.compile(r"\w+|[^\w\s]")
WEIGHTS = {2: 2 / 3, 3: 4 / 3}


def words(text: str) -> list[str]:
    """Words and single punctuation marks."""
    return _WORD.findall(text)


def entropy(tokens: Sequence[str], n: int) -> float:
    """Entropy of the distribution of n-grams, in bits; 0 for a text shorter than n."""
    counts = Counter(zip(*(tokens[start:] for start in range(n)), strict=False))
    total = sum(counts.values())
    return -math.fsum(count / total * math.log2(count / total) for count in counts.values()) if total else 0.0


def n_gram_entropy(text: str, tokenize: Tokenizer = words) -> float:
    """GE, fluency: mean of ``2/3 H_2`` and ``4/3 H_3``, in bits.

    Plain English has about 6, one repeated word 0.

    The released code divides the weighted sum by two. The papers print the formula without the division, but their
    numbers agree with it.
    """
    tokens = tokenize(text)
    return math.fsum(weight * entropy(tokens, n) for n, weight in WEIGHTS.items()) / len(WEIGHTS)


def inverse_document_frequencies(documents: Sequence[str], tokenize: Tokenizer = words) -> dict[str, float]:
    """Smoothed IDF of lower-cased tokens: ``ln((1 + N) / (1 + df)) + 1``.

    This is scikit-learn's default.
    """
    counts = Counter(token for document in documents for token in {token.lower() for token in tokenize(document)})
    return {token: math.log((1 + len(documents)) / (1 + count)) + 1 for token, count in counts.items()}


def tfidf_consistency(
    text: str, reference: str, weights: Mapping[str, float], tokenize: Tokenizer = words
) -> float | None:
    """RS, consistency: cosine of TF-IDF vectors of text and references, in 0..1.

    Args:
        text: all generations of a case, joined by spaces.
        reference: all reference texts, joined by spaces.
        weights: token -> IDF; other tokens are ignored, as with a fixed vocabulary.

    Returns:
        The cosine; ``None`` if one of the texts has no known token, which differs from being dissimilar.
    """
    first, second = (_vector(one, weights, tokenize) for one in (text, reference))
    if not first or not second:
        return None
    return math.fsum(value * second.get(token, 0.0) for token, value in first.items())


def _vector(text: str, weights: Mapping[str, float], tokenize: Tokenizer) -> dict[str, float]:
    counts = Counter(token.lower() for token in tokenize(text))
    vector = {token: count * weights[token] for token, count in counts.items() if token in weights}
    norm = math.sqrt(math.fsum(value * value for value in vector.values()))
    return {token: value / norm for token, value in vector.items()} if norm else {}
