"""Token positions of subjects where several tokens spell a character."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import normalizers

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, EDIT_LAYER, TOKENIZER_KINDS, build_model, build_tokenizer
from edit_hooks.modeling.tokens import encode, first_token_past, tokens_in_span
from edit_hooks.utils.errors import UnusableRequestError

TEXTS = ["東京都の首都", "The 日本東京 is", "é東 x", "The 🗼塔 stands"]


def spans_of(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Spans of the tokens of a text without those of special tokens before it."""
    encoding = encode(tokenizer, text)
    num_leading = sum(start == end for start, end in encoding.offsets)
    return encoding.offsets[num_leading:]


def test_byte_tokens_of_a_unigram_model_have_the_span_of_their_character() -> None:
    tokenizer = build_tokenizer("unigram_bos")
    assert spans_of(tokenizer, "東京都の首都") == [(i, i + 1) for i in range(6) for _ in range(3)]
    assert spans_of(tokenizer, "The 日東 is") == [(0, 3), (3, 4), *[(4, 5)] * 3, *[(5, 6)] * 3, (6, 9)]
    assert spans_of(tokenizer, "a東<0xE6>b") == [(0, 1), *[(1, 2)] * 3, (2, 8), (8, 9)]


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_up_to_a_character_spell_the_text_up_to_it(kind: str, text: str) -> None:
    """By decoding, which knows nothing of spans."""
    tokenizer = build_tokenizer(kind)
    encoding = encode(tokenizer, text)
    assert all(text[start:end].isascii() for start, end in encoding.offsets if end - start > 1)
    for end in range(1, len(text) + 1):
        if not any(start < end < stop for start, stop in encoding.offsets):  # not within a piece, as in "The"
            ids = encoding.ids[: first_token_past(encoding, end)]
            assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text[:end].strip()


SUBJECTS = {("東京都の首都", "東京"): 6, ("東京都の首都", "東京都"): 9, ("日本東京", "東京"): 12}


@pytest.mark.parametrize(("text", "subject"), SUBJECTS)
def test_the_last_token_of_a_subject_among_unknown_characters(text: str, subject: str) -> None:
    start = text.index(subject)
    for kind in ("unigram_bos", "byte_bpe_bos"):
        positions = tokens_in_span(encode(build_tokenizer(kind), text), (start, start + len(subject)))
        assert (positions[0], positions[-1]) == (1 + 3 * start, SUBJECTS[text, subject])


def test_edits_of_two_subjects_of_one_run_differ() -> None:
    model, tokenizer = build_model("gemma3_text"), build_tokenizer("unigram_bos")
    settings = {"layers": [EDIT_LAYER], "num_steps": 2, "context_templates": CONTEXT_TEMPLATES[:1]}
    subjects = ("東京", "東京都", "東京都の首都")
    requests = [EditRequest(prompt="東京都の首都", subject=subject, target_new="Rome") for subject in subjects]
    deltas = load_editor("r_rome", settings).edit(model, tokenizer, requests)
    assert len({delta.checksum() for delta in deltas}) == 3


def normalizing(*steps: Any) -> Any:
    tokenizer = build_tokenizer("unigram_bos")
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return tokenizer


def test_bytes_of_normalized_characters_are_those_of_the_characters() -> None:
    """One character becomes two, which share its span."""
    assert spans_of(normalizing(normalizers.NFKC()), "㍿東") == [*[(0, 1)] * 12, *[(1, 2)] * 3]
    assert spans_of(normalizing(normalizers.Lowercase()), "Ω東") == [*[(0, 1)] * 2, *[(1, 2)] * 3]


def test_bytes_of_characters_that_are_normalized_together_are_refused() -> None:
    """Only where a subject begins or ends among them."""
    tokenizer = normalizing(normalizers.NFC())
    text = "東か\u3099京"  # the second and third character become one
    encoding = encode(tokenizer, text)
    assert set(encoding.offsets[1:]) == {(0, 4)}
    assert tokens_in_span(encoding, (0, 4)) == list(range(1, 10))
    for span in ((0, 1), (3, 4)):
        with pytest.raises(UnusableRequestError, match="9 tokens the characters 0 to 4 of the prompt together"):
            tokens_in_span(encoding, span)
    editor = load_editor("r_rome")
    for prompt, subject, usable in ((text, text, True), (text, "東", False), (f"{text} is", text, True)):
        request = EditRequest(prompt=prompt, subject=subject, target_new="Rome")
        assert bool(editor.find_unusable(tokenizer, [request], None)) != usable
