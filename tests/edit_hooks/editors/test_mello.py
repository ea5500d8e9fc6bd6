"""MeLLo's rounds by hand: what the model reads in each, which fact it gets, and when it stops."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from lm_eval.api.instance import Instance
from lm_runs import build

from edit_hooks import EditRequest
from edit_hooks.answers import EditedAnswer, GeneratedText
from edit_hooks.decoding import Decoding
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.in_context.rounds import DEMONSTRATIONS, FACT, ROUND_TOKENS, Dialogue
from edit_hooks.in_context.selection import bare_question
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.asking.answers import NOT_FINITE, read_answer, why_no_answer
from lm_eval_tasks.common.asking.probes import Probe, ProbeAnswers
from lm_eval_tasks.common.scoring.measures import Unscored, agree_gen
from lm_eval_tasks.mquake.multi_hop import THOUGHT, final_answer
from lm_eval_tasks.protocols.fluency import generated_whole

TOWER, CAPITAL = "The country of Harrow Tower is", "The capital of Tarvia is"
FACTS = [
    ContextEdit(prompt=TOWER, target_new="Tarvia", rounds=4),
    ContextEdit(prompt=CAPITAL, target_new="Quill", rounds=4),
]
EDITS = [
    EditRequest(prompt=prompt, target_new=fact.target_new) for prompt, fact in zip((TOWER, CAPITAL), FACTS, strict=True)
]
QUESTION = "What is the capital of the country of Harrow Tower?"
PROMPT = f"Q: Who wrote Emma? A: Jane Austen\nQ: {QUESTION} A:"
# What the model writes, by the last line that it reads.
SCRIPT = {
    f"Question: {QUESTION}": "\nSubquestion: What is the country of Harrow Tower?\nGenerated answer: Ostrel.\n",
    f"{FACT} {TOWER} Tarvia.": (
        "\nThe fact contradicts the answer, so the answer is: Tarvia\nSubquestion: What is the capital of Tarvia?\n"
        "Generated answer: Sudden.\n"
    ),
    f"{FACT} {CAPITAL} Quill.": (
        "\nThe fact contradicts it: Quill\nFinal answer: Quill\n\nQuestion: Who else?\nFinal answer: No"
    ),
}


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        (PROMPT, QUESTION),
        ("Please answer the question:\n\nQ: Who is it?\nA:", "Who is it?"),
        ("Question: One?\nThoughts: x\nAnswer: y\n\nQuestion: Two?\nThoughts:", "Two?"),
        (f"{TOWER}", TOWER),
    ],
)
def test_only_the_last_question_of_a_prompt_counts(prompt: str, question: str) -> None:
    assert bare_question(prompt) == question


def test_a_dialogue_retrieves_a_fact_for_each_sub_question() -> None:
    dialogue = Dialogue(PROMPT, FACTS)
    assert dialogue.prompt == f"{DEMONSTRATIONS}\n\nQuestion: {QUESTION}"
    for number in (1, 2):
        dialogue.advance(SCRIPT[dialogue.prompt.splitlines()[-1]])
        assert dialogue.ongoing and dialogue.retrieved == [0, 1][:number]
    dialogue.advance(SCRIPT[dialogue.prompt.splitlines()[-1]])
    assert (dialogue.answer, dialogue.ongoing) == ("Quill", False)  # not that of the question after the blank line


def test_blank_lines_do_not_end_a_round_and_a_further_question_does() -> None:
    dialogue = Dialogue(PROMPT, FACTS)
    dialogue.advance(
        "\n\nSubquestion: What is the country of Harrow Tower?\n\nGenerated answer: Ostrel.\n\n"
        "Question: Else?\nSubquestion: What is the capital of Tarvia?\nGenerated answer: Sudden.\n"
    )
    assert dialogue.ongoing and dialogue.retrieved == [0]
    assert dialogue.prompt.endswith(
        f"{QUESTION}\nSubquestion: What is the country of Harrow Tower?\n\nGenerated answer: Ostrel.\n"
        f"{FACT} {TOWER} Tarvia."
    )


@pytest.mark.parametrize("text", ["", "Generated answer: Quill.", "Quill"])
def test_a_round_without_sub_question_ends_without_an_answer(text: str) -> None:
    dialogue = Dialogue(PROMPT, FACTS)
    dialogue.advance(text)
    assert (dialogue.answer, dialogue.ongoing, dialogue.retrieved) == ("", False, [])


def test_there_are_four_rounds_at_most() -> None:
    dialogue = Dialogue(PROMPT, FACTS)
    for number in range(1, 5):
        assert dialogue.ongoing
        dialogue.advance("Subquestion: What is the capital of Tarvia?\nGenerated answer: Sudden.")
        assert dialogue.num_rounds == number
    assert (dialogue.answer, dialogue.ongoing, dialogue.retrieved) == ("", False, [1, 1, 1])


def test_a_fact_that_is_not_similar_enough_is_not_read() -> None:
    dialogue = Dialogue(PROMPT, [ContextEdit(prompt=TOWER, target_new="Tarvia", rounds=4, min_similarity=0.99)])
    dialogue.advance("Subquestion: Who is it?\nGenerated answer: Me.")
    assert dialogue.prompt.endswith(f"{FACT} none.") and dialogue.retrieved == []


def test_facts_with_and_without_rounds_are_saved() -> None:
    for fact in (ContextEdit(prompt=TOWER, target_new="Tarvia"), FACTS[0]):
        assert ContextEdit.from_dict(json.loads(json.dumps(fact.to_dict()))) == fact


# --------------------------------------------------------------- through the model class


@pytest.fixture
def model(tiny_path, monkeypatch):
    """An edited model that writes by the script, and the items that it was given."""
    lm = build(str(tiny_path("llama")), editor="mello", editor_args={"embedder": "words"}, max_length=8192)
    seen = []

    def write(jobs):
        seen.append([item for item, _ in jobs])
        raws = [SCRIPT.get(item.text.splitlines()[-1], " no") for item, _ in jobs]
        return [
            GeneratedText(raw=raw, stops=item.stops, token_ids=(1,)) for raw, (item, _) in zip(raws, jobs, strict=True)
        ]

    monkeypatch.setattr(lm.engine, "generate", write)
    return lm, seen


def question(prompt: str, decoding: Decoding | None = None) -> Instance:
    asked = {"model": "edited", "decoding": decoding and decoding.to_json(), "until": ["\n"]}
    doc = {"edit_requests": [edit.to_dict() for edit in EDITS], "asked": asked, "case_id": "0"}
    arguments = (prompt, {"until": ["\n"], "max_gen_toks": 50})
    return Instance(request_type="generate_until", doc=doc, arguments=arguments, idx=0, metadata=("test", 0, 1))


def test_the_final_answer_is_the_answer(model) -> None:
    """One question needs three rounds, the other one; the rounds of both are generated together."""
    lm, seen = model
    answers = lm.generate_until([question(PROMPT), question("Q: Who is it? A:")])
    finals = [answer.final if isinstance(answer, EditedAnswer) else answer for answer in answers]
    assert [final.text.strip() for final in finals] == ["Quill", ""]
    assert [final.context.facts for final in finals] == [2, 0]
    assert [len(items) for items in seen if items] == [2, 1, 1]
    assert {(item.stops, item.max_new_tokens) for items in seen for item in items} == {((FACT,), ROUND_TOKENS)}
    assert finals[0].stops == ("\n",) and finals[0].token_ids is None


def test_after_thoughts_the_answer_has_the_line_that_is_read(model) -> None:
    """MQuAKE reads the line after "Answer:"; without a final answer there is none."""
    lm, _ = model
    shown = "Question: Who wrote Emma?\nThoughts: It was Jane.\nAnswer: Jane Austen\n\nQuestion: {}\nThoughts:"
    answers = lm.generate_until([question(shown.format(asked), THOUGHT) for asked in (QUESTION, "Who is it?")])
    finals = [answer.final if isinstance(answer, EditedAnswer) else answer for answer in answers]
    assert [final_answer(final.text) for final in finals] == ["Quill", ""] and finals[1].text == ""


def test_a_round_that_does_not_fit_is_reported(model) -> None:
    """As long as question and facts are whole, the answer is one under the edit."""
    lm, _ = model
    contexts = []
    for room in (4000, 300, 20):
        lm._max_length = ROUND_TOKENS + room
        (answer,) = lm.generate_until([question(PROMPT)])
        contexts.append(answer.final.context)
    assert [(context.cut, context.fact_cut) for context in contexts] == [(False, False), (True, False), (True, True)]


def test_a_round_of_a_broken_model_has_no_answer(model, monkeypatch) -> None:
    """Its text is noise, also if it looks like a final answer; the other dialogue goes on."""
    lm, seen = model
    write = lm.engine.generate

    def break_down(jobs):
        texts = write(jobs)
        return [
            replace(text, raw="Final answer: Quill", stop="not_finite") if TOWER in item.text.splitlines()[-1] else text
            for text, (item, _) in zip(texts, jobs, strict=True)
        ]

    monkeypatch.setattr(lm.engine, "generate", break_down)
    broken, other = (answer.final for answer in lm.generate_until([question(PROMPT), question("Q: Who is it? A:")]))
    assert not broken.is_finite and other.is_finite
    assert why_no_answer(broken) == NOT_FINITE and [len(items) for items in seen if items] == [2, 1]


def test_a_metric_of_token_ids_names_the_rounds(model) -> None:
    """The answer is the model's, but not a continuation of the prompt; no model class is at fault."""
    lm, _ = model
    (answer,) = lm.generate_until([question(PROMPT)])
    assert answer.final.context.rounds == 3
    read = replace(read_answer(answer, ["\n"]), unedited=GeneratedText(raw=" Elna", token_ids=(1, 2)))
    answered = ProbeAnswers(Probe(kind="", prompt=""), (), [read])
    for measure in (partial(agree_gen, read), partial(generated_whole, answered)):
        with pytest.raises(Unscored, match=r"the editor answers in rounds of sub-questions \(mello\)"):
            measure()


def test_an_answer_of_a_given_length_has_the_fact_before_it(model) -> None:
    lm, seen = model
    lm.generate_until([question(f"{TOWER}", Decoding(length_of="Tarvia"))])
    (item,) = [item for items in seen for item in items]
    assert item.text == f"New Fact: {TOWER} Tarvia\nPrompt: {TOWER}"


def test_chats_are_refused(model, monkeypatch) -> None:
    lm, _ = model
    monkeypatch.setattr(lm.prompt_edits, "is_chat", lambda prompt: True)
    with pytest.raises(EditingError, match="drop --apply_chat_template"):
        lm.generate_until([question(PROMPT)])
