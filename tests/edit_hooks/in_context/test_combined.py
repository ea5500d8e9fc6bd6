"""An editor combined with a context."""

from __future__ import annotations

from dataclasses import replace

import pytest
from context_edits import ICE, REQUEST, WORDS

from edit_hooks import EditingError, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings
from edit_hooks.in_context.combined import EditorWithContext


@pytest.fixture
def base():
    return load_editor("ft_m", contract_settings(editor_class("ft_m")))


def test_the_edit_is_that_of_the_editor_and_the_context_comes_on_top(base, tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    (alone,) = base.edit(model, tokenizer, [REQUEST])
    combined = EditorWithContext(base, load_editor("ice", {}))
    (delta,) = combined.edit(model, tokenizer, [REQUEST])
    assert delta.contexts == (ICE,) and delta.without_contexts.checksum() == alone.checksum()
    assert combined.name == delta.meta["editor"] == "ft_m+ice" and delta.meta["context"]["editor"] == "ice"
    assert delta.writes == ["weights", "context"] == list(combined.writes)


def test_settings_of_both_are_restored_from_stored_ones(base, tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    combined = EditorWithContext(base, load_editor("ice", {"min_similarity": 0.5}))
    config = combined.resolve_config(model, tokenizer)
    assert config.context_settings["min_similarity"] == 0.5 and config.layers == base.default_config(model).layers
    assert combined.resolve_config(model, tokenizer, config.to_dict()) == config


def test_a_request_that_the_editor_cannot_fit_is_named_with_a_context_too(tiny_model, tiny_tokenizer):
    """WISE also runs the target's last token."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    wise = load_editor("wise", contract_settings(editor_class("wise")))
    limit = next(n for n in range(1, 40) if not wise.find_unusable(tokenizer, [REQUEST], n, model))
    combined = EditorWithContext(wise, load_editor("ice", {}))
    assert combined.find_unusable(tokenizer, [REQUEST], limit - 1, model)
    assert not combined.find_unusable(tokenizer, [REQUEST], limit, model)
    kn = load_editor("kn", contract_settings(editor_class("kn")))  # which also runs the old answer
    long = replace(REQUEST, target_true=" ".join(["Ostravia"] * 40))
    assert not wise.find_unusable(tokenizer, [long], 60, model)
    assert (
        "target_true"
        in EditorWithContext(kn, load_editor("ice", {})).find_unusable(tokenizer, [long], 60, model)[long.key]
    )


def test_an_unusable_pool_is_refused_before_the_edit(base, tiny_model, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(base, "edit", lambda *_args, **_kwargs: pytest.fail("the edit was computed"))
    combined = EditorWithContext(base, load_editor("ike", {**WORDS, "pool": "nowhere.jsonl"}))
    with pytest.raises(EditingError, match="cannot be read"):
        combined.edit(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), [REQUEST])
