"""SCR through the model class: what the model is asked, and what it answers from after each choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lm_runs import build, instance

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.answers import FailedAnswer, GeneratedText
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.in_context.fact_choice import answer_prompt, choice_prompt, read_choice, sentence_of
from lm_eval_tasks.common.asking.answers import FACT_CUT, NOT_FINITE, read_answer

PLACES = ["Port Elna", "Harrow Tower", "Quarrow", "Tessaly", "Sund", "Brellin", "Caldora"]
EDITS = [EditRequest(prompt=f"The mayor of {place} is", target_new=f"Mara {place[:3]}") for place in PLACES]
PROMPT = "Q: Who is the mayor of Quarrow?\nA:"
CHOSEN = "The mayor of Quarrow is Mara Qua."
NONE = "no relevant fact."
WORDS = {"embedder": "words"}
UNTIL = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}


def ask(lm, *prompts, kind="loglikelihood", argument=None):
    doc = {"edit_requests": [edit.to_dict() for edit in EDITS], "asked": {"model": "edited"}, "case_id": "0"}
    argument = argument or (" Mara" if kind == "loglikelihood" else dict(UNTIL))
    answers = getattr(lm, kind)([instance(doc, prompt, argument, kind) for prompt in prompts])
    return [getattr(answer, "final", answer) for answer in answers]


@pytest.fixture
def scripted(tiny_path, monkeypatch):
    """A function to an edited model that chooses by a script, and the choices that it was asked for."""

    def make(reply: str, stop: str = "length", **options):
        lm, asked = build(str(tiny_path("llama")), editor="scr", **{"editor_args": WORDS, **options}), []
        generate = lm.engine.generate

        def write(jobs):
            choices = [(item, delta) for item, delta in jobs if item.text.endswith("Output:")]
            asked.extend(item for item, _ in choices)
            if choices:
                return [GeneratedText(raw=reply, stops=(), token_ids=(1,), stop=stop) for _ in choices]
            return generate(jobs)

        monkeypatch.setattr(lm.engine, "generate", write)
        return lm, asked

    return make


def test_the_model_chooses_among_the_nearest_facts_once_per_question(scripted):
    lm, asked = scripted(CHOSEN, max_length=2000)
    scores = ask(lm, PROMPT, PROMPT, "Q: Who is the mayor of Sund?\nA:")
    assert len(asked) == 2 and all(item.max_new_tokens == 50 and item.stops == () for item in asked)
    shown = asked[0].text.partition("Facts: \n")[2].partition("\nQuestion:")[0].splitlines()
    assert len(shown) == 5 and shown[0] == CHOSEN and "\nQuestion: Who is the mayor of Quarrow?\n" in asked[0].text
    contexts = [score.context for score in scores]
    assert [(context.facts, context.stated, context.reply) for context in contexts] == [(1, CHOSEN, CHOSEN)] * 3


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
@pytest.mark.parametrize("reply", [CHOSEN, NONE])
def test_answers_are_those_of_the_unedited_model_to_the_prompt_with_the_fact(scripted, tiny_path, kind, reply):
    """Without a relevant fact, to the unchanged prompt, bit for bit."""
    lm, _ = scripted(reply, max_length=2000)
    plain = build(str(tiny_path("llama")), mode="none", max_length=2000)
    longer = answer_prompt(CHOSEN, PROMPT)
    assert longer.endswith(f"Fact: {CHOSEN}\nQuestion: Who is the mayor of Quarrow?\nAnswer:")
    (edited,), (expected,) = ask(lm, PROMPT, kind=kind), ask(plain, longer if reply == CHOSEN else PROMPT, kind=kind)
    assert edited.context.facts == (reply == CHOSEN) and edited.token_ids == expected.token_ids
    if kind == "loglikelihood":
        assert edited.logprob == expected.logprob


def test_a_broken_choice_is_unscored(scripted):
    """Its text is noise, also if it names a fact."""
    lm, _ = scripted(CHOSEN, stop="not_finite", max_length=2000)
    (answer,) = ask(lm, PROMPT)
    read = read_answer(answer)
    assert answer.context.no_choice and isinstance(read, FailedAnswer) and read.reason == NOT_FINITE


@pytest.mark.parametrize(("max_length", "answer_tokens", "is_lost"), [(90, 5, True), (400, 395, True), (400, 5, False)])
def test_an_answer_without_its_facts_is_unscored(scripted, max_length, answer_tokens, is_lost):
    """They can be lost before the choice, and before the answer."""
    lm, asked = scripted(CHOSEN, max_length=max_length)
    (answer,) = ask(lm, PROMPT, kind="generate_until", argument={**UNTIL, "max_gen_toks": answer_tokens})
    read = read_answer(answer)
    assert answer.context.cut == is_lost and len(asked) == 1
    assert (isinstance(read, FailedAnswer) and read.reason == FACT_CUT) == is_lost


def test_in_a_chat_the_answer_prompt_is_the_last_user_message(scripted):
    lm, asked = scripted(CHOSEN, max_length=2000)
    lm.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    chat = lm.apply_chat_template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}])
    item = lm.items.score_item(chat, " Mara").item
    (delta,) = load_editor("scr", WORDS).edit(lm.model, lm.tokenizer, EDITS, joint=True)
    placed = lm.prompt_edits.with_context(item, delta).item
    assert placed.texts[0] == f"<system>Be brief.<user>{answer_prompt(CHOSEN, PROMPT)}"
    assert asked[0].text == choice_prompt(nearest(delta.contexts, asked[0].text), PROMPT)


def nearest(facts, text):
    """The facts in the order in which a prompt shows them."""
    shown = [fact for fact in facts if f"{fact.statement}." in text]
    return sorted(shown, key=lambda fact: text.index(fact.statement))


@pytest.mark.parametrize(
    ("reply", "chosen"),
    [
        ("It is: the mayor of Sund is Mara Sunder", "The mayor of Sund is Mara Sunder."),
        ("The mayor of Sund is Mara Sun.", "The mayor of Sund is Mara Sun."),
        ("The mayor of Sund is Else.", None),
        ("The album False Alarm is 3.5 hours long.", "The album False Alarm is 3.5 hours long."),
        (NONE, None),
        ("", None),
    ],
)
def test_named_facts_are_edits_in_full(reply, chosen):
    facts = [("The mayor of Sund is", "Mara Sun"), ("The mayor of Sund is", "Mara Sunder")]
    facts.append(("The album False Alarm is", "3.5 hours long"))
    assert read_choice(reply, [ContextEdit(*fact) for fact in facts], "named") == chosen
    assert read_choice(reply, [ContextEdit(*facts[0])], "named") in (chosen, "The mayor of Sund is Mara Sun.", None)


def test_facts_of_other_scripts_have_one_end_and_are_chosen_without_it():
    facts = [
        ContextEdit("法国的首都是", "罗马。", separator=""),
        ContextEdit("भारत की राजधानी", "पुणे है।"),
        ContextEdit("谁", "是他\uff1f", separator=""),
    ]
    assert [sentence_of(fact) for fact in facts] == ["法国的首都是罗马。", "भारत की राजधानी पुणे है।", "谁是他\uff1f"]
    for fact in facts[:2]:
        assert read_choice(sentence_of(fact)[:-1], facts, "named") == sentence_of(fact)
    reply = "The fact that best matches the question is 法国的首都是罗马。"
    assert read_choice(reply, facts, "released") == "法国的首都是罗马。"
    assert read_choice("法国的首都是罗马。", facts, "released") == "法国的首都是罗马。"


def test_the_rule_of_the_settings_is_the_one_that_reads(scripted):
    for rule, facts in (("released", 1), ("named", 0)):
        lm, _ = scripted("Nobody is the mayor of it.", editor_args={**WORDS, "reply": rule}, max_length=2000)
        (answer,) = ask(lm, PROMPT)
        assert answer.context.facts == facts


def test_a_memory_without_facts_is_refused():
    with pytest.raises(EditingError, match="include_fact=false leaves scr without a fact"):
        load_editor("scr", {**WORDS, "include_fact": False})
    with pytest.raises(EditingError, match="'released' or 'named'"):
        replace(load_editor("scr", WORDS).config_class(**WORDS), reply="other")
