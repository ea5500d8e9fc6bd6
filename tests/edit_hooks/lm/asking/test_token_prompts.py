"""Every target token scored after a prompt of its own, against MEMIT's released procedure written separately."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from context_edits import WORDS
from family_tokenizers import build_family_tokenizer
from lm_runs import assert_same_answers, build, case, instance

from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.utils.errors import EditingError, UnusableRequestError

QUESTION = "Which river flows through Port Elna?"
RULE = "as_decoded"
TARGETS = (" Sôme lake", " the Ull")
tokenizer_of = functools.cache(build_family_tokenizer)


def asked(rule: str | None, model: str = "edited") -> dict[str, Any]:
    return {**case(), "asked": {"model": model} | ({"token_prompts": rule} if rule else {})}


@pytest.fixture(scope="module")
def family_model(tiny_model: Any) -> Any:
    def make(family: str) -> EditedHFLM:
        return EditedHFLM(tiny_model("llama"), tokenizer=tokenizer_of(family), mode="none", store="off", device="cpu")

    return functools.cache(make)


def item_of(lm: EditedHFLM, target: str, rule: str) -> Any:
    return lm.items.from_instance(instance(asked(rule), QUESTION, target))[0]


def test_a_character_of_several_tokens_is_wanted_as_the_first_token_of_the_replacement_character(
    family_model: Any,
) -> None:
    """By hand: GPT-2's pieces of " Sôme lake" are " S", two bytes of ô, "m", "e", " l", "ak", "e"."""
    lm = family_model("gpt2")
    tokens = lm.tokenizer.convert_ids_to_tokens
    item = item_of(lm, " Sôme lake", "as_decoded")
    assert tokens(lm.tokenizer(" Sôme lake").input_ids) == ["ĠS", "Ã", "\u00b4", "m", "e", "Ġl", "ak", "e"]
    assert tokens(list(item.continuation)) == ["ĠS", "ï", "ï", "m", "e", "Ġl", "ak", "e"]  # ï: first byte of U+FFFD
    prefixes = [lm.tokenizer.decode(ids).removeprefix(QUESTION) for ids in item.by_token.ids]
    assert prefixes == ["", " S", " S\ufffd", " Sô", " Sôm", " Sôme", " Sôme l", " Sôme lak"]
    assert [part.continuation for part in item.parts] == [(token,) for token in item.continuation]


@pytest.mark.parametrize(
    ("family", "rule", "second"),
    [
        ("gpt2", "as_decoded", "? Sôm"),
        ("gpt2", "extra_space", "?  Sôm"),
        ("llama-3", "as_decoded", "? Sôm"),
        ("llama-3", "extra_space", "?  Sôm"),
        ("mistral-1", "as_decoded", "? Sôm"),  # its decoder drops the space at the beginning
    ],
)
def test_the_gold_prefix_follows_the_question_after_white_space(
    family_model: Any, family: str, rule: str, second: str
) -> None:
    lm = family_model(family)
    item = item_of(lm, " Sôme lake", rule)
    texts = [lm.tokenizer.decode(ids, skip_special_tokens=True) for ids in item.by_token.ids]
    assert texts[0] == QUESTION and any(text.endswith(second) for text in texts)
    begins = tuple(lm.tokenizer("x").input_ids[:1]) if lm.tokenizer.bos_token else ()
    assert all(ids[: len(begins)] == begins for ids in item.by_token.ids)  # one BOS, as before any prompt
    assert not set(begins) & set(item.continuation)  # and none before a token's own text


def test_a_token_without_text_is_wanted_as_the_end_of_text(family_model: Any) -> None:
    """Llama-2 begins a word after a space with a token of its own, which decodes to nothing."""
    lm = family_model("llama-2")
    item = item_of(lm, " Sôme", "as_decoded")
    assert lm.tokenizer.convert_ids_to_tokens(lm.tokenizer(" Sôme").input_ids)[1:3] == ["▁", "▁S"]
    assert item.continuation[0] == lm.tokenizer.eos_token_id and len(item.continuation) == 6
    assert lm.tokenizer.decode(item.by_token.ids[1], skip_special_tokens=True) == f"{QUESTION} "


def released(lm: EditedHFLM, target: str) -> list[tuple[int, int]]:
    """(argmax, wanted id) of each target token, by the released steps on the bare model."""
    tokenizer, pairs = lm.tokenizer, []
    target_ids = tokenizer(target)["input_ids"]
    for number, token in enumerate(target_ids):
        prompt = QUESTION + tokenizer.decode(target_ids[:number])
        with torch.no_grad():
            logits = lm.model(torch.tensor([tokenizer(prompt)["input_ids"]])).logits
        pairs.append((int(logits[0, -1].argmax()), tokenizer(tokenizer.decode([token]))["input_ids"][0]))
    return pairs


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_answers_are_those_of_the_released_procedure(tiny_model: Any, engine: str) -> None:
    lm = EditedHFLM(
        tiny_model("gpt2"),
        tokenizer=tokenizer_of("gpt2"),
        **{"mode": "none", "store": "off", "device": "cpu", "engine": engine},
    )
    answers = lm.loglikelihood([instance(asked("as_decoded"), QUESTION, target) for target in TARGETS])
    for answer, target in zip(answers, TARGETS, strict=True):
        expected = released(lm, target)
        assert isinstance(answer.final, ScoredContinuation)
        assert answer.final.token_argmax == tuple(argmax for argmax, _ in expected)
        assert answer.final.token_ids == tuple(wanted for _, wanted in expected)
        assert answer.final.is_greedy == all(argmax == wanted for argmax, wanted in expected)
        assert answer.final.logprob == pytest.approx(sum(answer.final.token_logprobs or ()))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def test_edits_and_both_models_and_the_store_know_the_form(model_path: str, tmp_path: Path) -> None:
    """An edited and an unedited answer in one call; the stored answer of one form is not taken for the other's."""
    forms = [asked("as_decoded", "both"), asked(None, "both"), asked("extra_space", "both")]
    requests = [instance(doc, "Port Elna is the capital of", " Dravonia") for doc in forms]
    fresh = build(model_path, tmp_path).loglikelihood(requests)
    again = build(model_path, tmp_path).loglikelihood(requests[::-1])[::-1]
    assert_same_answers(fresh, again)
    for answer in fresh:
        assert answer.edit is not None and answer.final.unedited is not None
        assert answer.final.logprob != answer.final.unedited.logprob
    by_token, along, spaced = (answer.final.unedited for answer in fresh)
    assert by_token.logprob != spaced.logprob  # another prompt
    assert len(by_token.token_ids) == len(along.token_ids)


def test_a_context_edit_comes_before_every_prompt(model_path: str) -> None:
    lm = build(model_path, editor="ike", editor_args=WORDS)
    request = instance(asked("as_decoded", "both"), "Port Elna is the capital of", " Sôme")
    (answer,) = lm.loglikelihood([request])
    assert answer.final.context is not None and answer.final.context.facts == 1
    assert answer.final.token_ids == answer.final.unedited.token_ids
    assert answer.final.logprob != answer.final.unedited.logprob


@pytest.mark.parametrize("editor", ["grace", "melo"])
def test_memories_that_look_up_the_end_of_a_prompt_hold_at_the_first_token_only(model_path: str, editor: str) -> None:
    """As in the release's arithmetic: the later prompts end elsewhere, so their keys are not those of the edit."""
    lm = build(model_path, editor=editor, editor_args=dict(editor_class(editor).contract_settings))
    requests = [instance(asked(rule, "both"), "Port Elna is the capital of", " Dravonia") for rule in (None, RULE)]
    changed = []
    for answer in lm.loglikelihood(requests):
        pairs = zip(answer.final.token_logprobs, answer.final.unedited.token_logprobs, strict=True)
        changed.append([abs(edited - unedited) > 1e-4 for edited, unedited in pairs])
    along, by_token = changed
    assert len(along) > 2 and all(along)
    assert by_token[0] and not any(by_token[1:])


def test_what_cannot_be_asked_is_refused(family_model: Any) -> None:
    lm = family_model("gpt2")
    with pytest.raises(EditingError, match="token_prompts='spaced'; as_decoded, extra_space are accepted"):
        item_of(lm, " Ull", "spaced")
    with pytest.raises(UnusableRequestError, match="has no token"):
        item_of(lm, "", "as_decoded")


@pytest.mark.parametrize("family", ["gpt2", "llama-2", "mistral-3", "gemma"])
@pytest.mark.parametrize(("prompt", "target"), [("挪威的首都是", "利马"), ("Call qulib.", "open_pane")])
def test_a_target_without_a_space_has_its_tokens_of_the_whole_text(
    family_model: Any, family: str, prompt: str, target: str
) -> None:
    """By itself it would begin with the mark of a text's start, "▁", in some families."""
    lm = family_model(family)
    item = lm.items.from_instance(instance(asked(RULE), prompt, target))[0]
    along = lm.items.from_instance(instance(asked(None), prompt, target))[0]
    assert item.continuation == along.continuation
    assert item.by_token.ids == tuple(
        (*along.context, *along.continuation[:number]) for number in range(len(along.continuation))
    )
    text = lm.tokenizer.decode([*item.by_token.ids[-1], item.continuation[-1]], skip_special_tokens=True)
    assert text.removeprefix(" ") == prompt + target
