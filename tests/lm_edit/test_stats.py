"""Second moments collected ahead of edits."""

from __future__ import annotations

import pytest

from edit_hooks.contract.tiny_models import EDIT_LAYER
from lm_edit.stats import corpus_label, list_stored_moments, prepare_stats


@pytest.fixture
def options(tiny_path):
    return {"pretrained": str(tiny_path("llama")), "device": "cpu"}


def test_post_processing_editors_use_the_second_moments_of_their_base(options, tmp_path):
    settings = {"layers": [EDIT_LAYER], "base": "memit"}
    (report,) = prepare_stats(options, editor="rect", settings=settings, folder=tmp_path, quiet=True)
    settings = {"layers": [EDIT_LAYER]}
    (again,) = prepare_stats(options, editor="memit", settings=settings, folder=tmp_path, quiet=True)
    assert report.is_new and not again.is_new
    assert len(list_stored_moments(tmp_path)) == 1


def test_unreadable_files_are_named_and_skipped(tmp_path, caplog):
    (tmp_path / "manifest.json").write_text("{")
    (tmp_path / "matrix.safetensors").write_bytes(b"x")
    assert list_stored_moments(tmp_path) == []
    assert "manifest.json cannot be read" in caplog.text and "matrix.safetensors cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("corpus", "label"),
    [
        ({"kind": "texts", "documents": 3, "sha256": "0123456789"}, "3 texts 01234567"),
        (
            {"kind": "hub", "dataset": "owner/name", "config": None, "revision": "abcdefghij", "seed": 2},
            "owner/name@abcdefgh seed 2",
        ),
        ({"kind": "self", "seed": 0}, "self seed 0"),
    ],
)
def test_corpora_have_short_labels(corpus, label):
    assert corpus_label(corpus) == label
