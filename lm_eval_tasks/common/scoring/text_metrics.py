"""Metrics of whole texts, from the evaluation of ROME and MEMIT.

They are n-gram entropy (fluency) and TF-IDF consistency.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from edit_hooks.utils.errors import EditingError

if TYPE_CHECKING:  # imported where it is used: its import takes a second
    from nltk.tokenize.punkt import PunktSentenceTokenizer

Tokenizer: TypeAlias = Callable[[str], Sequence[str]]

WEIGHTS = {2: 2 / 3, 3: 4 / 3}
_TFIDF_WORD = re.compile(r"\b\w\w+\b")


def normalize_generation(text: str) -> str:
    """A text as the released evaluation stores it: NFKD, and a space for each empty line."""
    return unicodedata.normalize("NFKD", text).replace("\n\n", " ")


def split_words(text: str) -> list[str]:
    """Words by the rules of nltk, in sentences of an untrained Punkt; needs no download.

    It differs from :func:`split_words_released` after abbreviations: where Punkt has not learned one, its period is a
    token and ends a sentence.
    """
    return _split_words(text, _untrained_sentences())


def split_words_released(text: str) -> list[str]:
    """Words as of nltk's ``word_tokenize``, which the published fluency counts.

    Raises:
        EditingError: if nltk's data ``punkt_tab`` are not installed.
    """
    return _split_words(text, _english_sentences())


def _split_words(text: str, sentences: PunktSentenceTokenizer) -> list[str]:
    from nltk.tokenize import NLTKWordTokenizer

    words = NLTKWordTokenizer()
    return [word for sentence in sentences.tokenize(text) for word in words.tokenize(sentence)]


@functools.cache
def _untrained_sentences() -> PunktSentenceTokenizer:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    return PunktSentenceTokenizer()


@functools.cache
def _english_sentences() -> PunktSentenceTokenizer:
    from nltk.tokenize import PunktTokenizer

    try:
        return PunktTokenizer("english")
    except LookupError:
        raise EditingError(
            "released_tokenizer=true needs the data punkt_tab of nltk, which are not installed. Run "
            "'python -m nltk.downloader punkt_tab', or drop the setting."
        ) from None


def entropy(tokens: Sequence[str], n: int) -> float:
    """Entropy of the distribution of n-grams, in bits; 0 for a text shorter than n."""
    counts = Counter(zip(*(tokens[start:] for start in range(n)), strict=False))
    total = sum(counts.values())
    return -math.fsum(count / total * math.log2(count / total) for count in counts.values()) if total else 0.0


def n_gram_entropy(text: str, tokenize: Tokenizer = split_words) -> float:
    """GE, fluency: mean of ``2/3 H_2`` and ``4/3 H_3``, in bits.

    Plain English of 100 tokens has about 6, one repeated word 0.

    The released code divides the weighted sum by two. The papers print the formula without the division, but their
    numbers agree with it.
    """
    tokens = tokenize(text)
    return math.fsum(weight * entropy(tokens, n) for n, weight in WEIGHTS.items()) / len(WEIGHTS)


def tfidf_words(text: str) -> list[str]:
    """Lower-cased words of two characters or more, as of scikit-learn's ``TfidfVectorizer`` by default."""
    return _TFIDF_WORD.findall(text.lower())


def inverse_document_frequencies(documents: Sequence[str]) -> dict[str, float]:
    """Smoothed IDF of words: ``ln((1 + N) / (1 + df)) + 1``.

    This is scikit-learn's default, and how the released code computes its IDF from the reference texts.
    """
    counts = Counter(word for document in documents for word in set(tfidf_words(document)))
    return {word: math.log((1 + len(documents)) / (1 + count)) + 1 for word, count in counts.items()}


def tfidf_consistency(text: str, reference: str, weights: Mapping[str, float]) -> float | None:
    """RS, consistency: cosine of TF-IDF vectors of text and references, in 0..1.

    Args:
        text: all generations of a case, joined by spaces.
        reference: all reference texts, joined by spaces.
        weights: word -> IDF; other words are ignored, as with a fixed vocabulary.

    Returns:
        The cosine; ``None`` if one of the texts has no known word, which differs from being dissimilar.
    """
    first, second = (_vector(one, weights) for one in (text, reference))
    if not first or not second:
        return None
    return math.fsum(value * second.get(word, 0.0) for word, value in first.items())


def _vector(text: str, weights: Mapping[str, float]) -> dict[str, float]:
    counts = Counter(tfidf_words(text))
    vector = {word: count * weights[word] for word, count in counts.items() if word in weights}
    norm = math.sqrt(math.fsum(value * value for value in vector.values()))
    return {word: value / norm for word, value in vector.items()} if norm else {}
