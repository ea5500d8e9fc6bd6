"""Sources of text for second moments: files, folders and lists, and errors for everything else."""

from __future__ import annotations

import json

import pytest

from edit_hooks import EditingError
from edit_hooks.locate.moments.corpora import check_source, digest_of, open_corpus

TEXTS = ["The river begins here.", "It ends\nat the sea.", "Naïve 東京."]


def test_files_folders_and_lists_of_the_same_texts_are_one_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join([*TEXTS[:2], "  "]), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": TEXTS[2]}) + "\n\n", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not read", encoding="utf-8")
    corpora = [open_corpus(source, 0) for source in (TEXTS, tuple(TEXTS), tmp_path, str(tmp_path))]
    for corpus in corpora:
        assert list(corpus.documents()) == TEXTS and corpus.identity == corpora[0].identity
        assert corpus.is_finite and not corpus.is_sampled
    assert open_corpus(TEXTS[:2], 0).identity != corpora[0].identity


def test_sampled_text_is_identified_by_its_seed():
    corpus = open_corpus("self", 3)
    assert corpus.is_sampled and corpus.identity == {"kind": "self", "seed": 3, "sampler": 2}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "no file or folder 'nowhere.txt'.*hub id like"),
        ("selff", "no file or folder"),
        ("a/b/c/d", "no file or folder"),
        ([" "], "source is empty"),
        # Their bytes, keys or the working directory would pass for text.
        ("matrices.safetensors", "'matrices.safetensors' is no source of text"),
        ("owner/name.safetensors", "no source of text"),
        ({"layer0": 1}, "type dict is no source of text"),
        ("", "'' is no source of text"),
        (None, "NoneType"),
        (["a", 1], "list with int in it"),
    ],
)
def test_bad_sources_are_explained(source, message):
    for read in (lambda: open_corpus(source, 0), lambda: check_source(source)):
        with pytest.raises(EditingError, match=message):
            read()


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"body": "no text"}\n', encoding="utf-8")
    with pytest.raises(EditingError, match=r"cannot read text from broken\.jsonl.*'text'"):
        open_corpus(path, 0)


def test_unreachable_corpora_name_the_alternatives(monkeypatch):
    import huggingface_hub

    def refuse(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(EditingError, match=r"wikimedia/wikipedia.*'self', text of the model"):
        open_corpus("wikimedia/wikipedia/20231101.en", 0)


def test_the_digest_follows_the_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one", encoding="utf-8")
    first, folder = digest_of(path), digest_of(tmp_path)
    assert first == digest_of(str(path)) and first is not None and first == folder
    path.write_text("two", encoding="utf-8")
    assert digest_of(path) != first
    assert digest_of(tmp_path / "missing") is None
