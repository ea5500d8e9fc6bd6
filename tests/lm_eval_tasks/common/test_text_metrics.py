"""N-gram entropy by hand, and TF-IDF consistency against scikit-learn."""

from __future__ import annotations

import math

import pytest

from lm_eval_tasks.common.text_metrics import inverse_document_frequencies, n_gram_entropy, tfidf_consistency


def test_n_gram_entropy_by_hand() -> None:
    # bigrams ab bc ca ab: 1/2, 1/4, 1/4 -> 1.5 bits; trigrams abc bca cab: log2 3
    assert n_gram_entropy("a b c a b") == pytest.approx((2 / 3 * 1.5 + 4 / 3 * math.log2(3)) / 2)
    assert n_gram_entropy("no no no no no") == 0.0
    assert n_gram_entropy("") == n_gram_entropy("one") == 0.0
    assert n_gram_entropy("aabca", tokenize=list) > 0


def test_tfidf_consistency_agrees_with_scikit_learn() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    documents = ["the cat sat on the mat", "the dog sat", "a bird sang on the roof", "cats and dogs"]
    vectorizer = TfidfVectorizer(token_pattern=r"\w+").fit(documents)
    weights = inverse_document_frequencies(documents)
    text, reference = "the cat sang and sang, unseen", "a dog sang on the mat"
    first, second = vectorizer.transform([text, reference]).toarray()
    assert tfidf_consistency(text, reference, weights) == pytest.approx(float(first @ second), abs=1e-12)
    assert tfidf_consistency(text, text, weights) == pytest.approx(1.0)
    assert tfidf_consistency("cat", "dog", weights) == 0.0
    assert tfidf_consistency("unseen", "dog", weights) is None
