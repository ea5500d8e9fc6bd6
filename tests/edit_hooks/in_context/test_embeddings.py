"""Embedders by name: hashed words, sentence-transformers, similarity."""

from __future__ import annotations

import importlib.util
import sys
import types
import zlib

import pytest
import torch

from edit_hooks import EditingError
from edit_hooks.in_context import embeddings
from edit_hooks.in_context.embeddings import (
    CHUNK,
    WORD_WIDTH,
    Embedder,
    embed_words,
    load_embedder,
    most_similar,
    require_embedder,
)

TEXTS = ["the lake lies in peru", "she plays the harp", "the lake lies in chile", "the lake lies in peru"]


def test_word_vectors_have_unit_length_and_do_not_depend_on_the_process():
    rows = embed_words([*TEXTS, ""])
    torch.testing.assert_close(rows[:-1].norm(dim=1), torch.ones(4))
    assert not rows[-1].any()
    # Not Python's hash, which is salted per process. The word, and the trigrams " ha", "har", "arp" and "rp ".
    features = ["harp", " ha", "har", "arp", "rp "]
    expected = sorted(zlib.crc32(text.encode()) % WORD_WIDTH for text in features)
    assert embed_words(["harp"])[0].nonzero()[:, 0].tolist() == expected


def test_equal_texts_are_most_similar_and_ties_go_to_the_earlier_one():
    found = most_similar("words", TEXTS[3], TEXTS, 4)
    assert [text.number for text in found] == [0, 3, 2, 1]
    assert [text.similarity for text in found[:2]] == pytest.approx([1, 1]) and found[2].similarity < 0.99
    assert most_similar("words", TEXTS[3], TEXTS, 2) == found[:2]


def test_each_text_is_embedded_once():
    calls: list[list[str]] = []

    def embed(texts):
        calls.append(list(texts))
        return embed_words(texts)

    embedder = Embedder(embed)
    texts = [f"text {number}" for number in range(CHUNK + 2)]
    rows = embedder([*texts, *texts])
    assert torch.equal(rows[: len(texts)], rows[len(texts) :]) and torch.equal(rows[0], embed_words(texts[:1])[0])
    assert embedder(["new", *texts]).shape == (len(texts) + 1, WORD_WIDTH)
    assert calls == [texts[:CHUNK], texts[CHUNK:], ["new"]]


def test_an_embedder_is_built_once_and_replaced_with_its_factory(monkeypatch):
    assert load_embedder("words") is load_embedder("words")
    before = load_embedder("words")
    monkeypatch.setitem(embeddings.EMBEDDERS, "words", lambda: lambda texts: torch.ones(len(texts), 1))
    assert load_embedder("words") is not before and load_embedder("words")(["a"]).tolist() == [[1.0]]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(EditingError, match=r"lm-eval-editing\[ike\]"):
        load_embedder("missing/package")
    require_embedder("words")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EditingError, match=r"lm-eval-editing\[ike\]"):
        require_embedder("missing/package")


def test_sentence_transformers_give_unit_vectors_without_a_progress_bar(monkeypatch):
    """A stand-in for the package records its arguments."""

    class SentenceTransformer:
        def __init__(self, name, device):
            if name == "no/model":
                raise OSError("no such model")
            assert (name, device) == ("a/folder", "cpu")

        def encode(self, texts, normalize_embeddings, show_progress_bar):
            assert normalize_embeddings and not show_progress_bar
            return embed_words(texts).numpy()

    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    try:
        assert torch.equal(load_embedder("a/folder")(TEXTS), load_embedder("words")(TEXTS))
        with pytest.raises(EditingError, match=r"cannot be loaded \(no such model\)"):
            load_embedder("no/model")
    finally:
        embeddings._sentence_transformer.cache_clear()
