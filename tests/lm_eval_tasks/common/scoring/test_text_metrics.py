"""N-gram entropy by hand and over the words of nltk, and TF-IDF consistency against scikit-learn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.scoring import text_metrics
from lm_eval_tasks.common.scoring.text_metrics import (
    inverse_document_frequencies,
    n_gram_entropy,
    normalize_generation,
    split_words,
    split_words_released,
    tfidf_consistency,
    tfidf_words,
)

TEXT = "Dr. Smith left. He didn't sleep (much)."


def test_n_gram_entropy_by_hand() -> None:
    # bigrams ab bc ca ab: 1/2, 1/4, 1/4 -> 1.5 bits; trigrams abc bca cab: log2 3
    assert n_gram_entropy("a b c a b") == pytest.approx((2 / 3 * 1.5 + 4 / 3 * math.log2(3)) / 2)
    assert n_gram_entropy("no no no no no") == 0.0
    assert n_gram_entropy("") == n_gram_entropy("one") == 0.0
    assert n_gram_entropy("aabca", tokenize=list) > 0


def test_words_without_download_split_sentences_and_know_no_abbreviation() -> None:
    words = ["Dr", ".", "Smith", "left", ".", "He", "did", "n't", "sleep", "(", "much", ")", "."]
    assert split_words(TEXT) == words


def test_released_words_need_the_data_of_nltk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    text_metrics._english_sentences.cache_clear()
    with pytest.raises(EditingError, match=r"python -m nltk.downloader punkt_tab"):
        split_words_released(TEXT)
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in {"abbrev_types.txt": "dr\n", "collocations.tab": "", "sent_starters.txt": ""}.items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "ortho_context.tab").write_text("", encoding="utf-8")
    try:
        words = ["Dr.", "Smith", "left", ".", "He", "did", "n't", "sleep", "(", "much", ")", "."]
        assert split_words_released(TEXT) == words
    finally:
        text_metrics._english_sentences.cache_clear()


def test_generations_are_normalized_as_released() -> None:
    assert normalize_generation("\ufb01ne caf\u00e9\n\nnew\nline") == "fine cafe\u0301 new\nline"


def test_tfidf_words_are_those_of_scikit_learn() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    analyze = TfidfVectorizer().build_analyzer()
    for text in (
        "A cat, I saw 2 or 22 of_them: I've",
        "\u0130STANBUL \u0130s",
        "cafe\u0301s Stra\u00dfe \u00c9tat",
        "x",
    ):
        assert tfidf_words(text) == analyze(text)
    assert tfidf_words("I saw a Cat") == ["saw", "cat"]


def test_tfidf_consistency_agrees_with_scikit_learn() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    documents = ["the cat sat on the mat", "the dog sat", "a bird sang on the roof", "cats and dogs"]
    vectorizer = TfidfVectorizer().fit(documents)
    weights = inverse_document_frequencies(documents)
    assert weights == pytest.approx(dict(zip(vectorizer.get_feature_names_out(), vectorizer.idf_, strict=True)))
    text, reference = "the cat sang and sang a song, unseen", "a dog sang on the mat"
    first, second = vectorizer.transform([text, reference]).toarray()
    assert tfidf_consistency(text, reference, weights) == pytest.approx(float(first @ second), abs=1e-12)
    assert tfidf_consistency(text, text, weights) == pytest.approx(1.0)
    assert tfidf_consistency("cat", "dog", weights) == 0.0
    assert tfidf_consistency("unseen", "dog", weights) is None
