"""Context templates: sampled sets, and lists that are checked."""

from __future__ import annotations

import pytest
from state import assert_same_state

from edit_hooks import EditingError
from edit_hooks.contract.state import snapshot
from edit_hooks.locate.context_templates import check_templates, sample_templates
from edit_hooks.modeling.forward.sampling import SEED_WORDS


def test_a_sampled_set_begins_with_the_bare_template(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("gemma3_text"), tiny_tokenizer("unigram_bos")
    before = snapshot(model, tokenizer)
    texts = sample_templates(model, tokenizer, "sampled_11", 3)
    assert len(texts) == 11 and texts[0] == "{}" and all(text.count("{}") == 1 for text in texts)
    assert sample_templates(model, tokenizer, "bare", 3) == ["{}"]
    assert_same_state(before, snapshot(model, tokenizer))


def test_a_set_depends_on_the_seed_only(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    assert sample_templates(model, tokenizer, "sampled_6", 1) == sample_templates(model, tokenizer, "sampled_6", 1)
    assert sample_templates(model, tokenizer, "sampled_6", 1) != sample_templates(model, tokenizer, "sampled_6", 2)


def test_the_longer_set_counts_new_tokens_only(tiny_model, tiny_tokenizer, monkeypatch):
    """Ten tokens in all, start token and first word included, or ten after those."""
    tokenizer, asked = tiny_tokenizer("byte_bpe_bos"), []

    def record(_model, _tokenizer, prompts, _generator):
        asked.append(prompts)
        return [word for word, _ in prompts]

    monkeypatch.setattr("edit_hooks.locate.context_templates.sample_after", record)
    for name in ("sampled_6", "sampled_6_longer"):
        sample_templates(tiny_model("llama"), tokenizer, name, 1)
    given = {word: len(tokenizer(word)["input_ids"]) for word in SEED_WORDS}
    assert asked == [[(word, 10) for word in given], [(word, 10 + count) for word, count in given.items()]]
    assert min(given.values()) == 2


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ("sampled_7", "Did you mean 'sampled_"),
        (["The train left. {}"], "must begin with the bare template"),
        ([], "must begin with the bare template"),
        (["{}", "The train left."], "0 slots"),
        (["{}", "{} and {}"], "2 slots"),
    ],
)
def test_wrong_templates_are_refused(templates, message):
    with pytest.raises(EditingError, match=message):
        check_templates(templates)
