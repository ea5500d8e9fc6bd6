"""Consequence fine-tuning: which written lines become rows, the fixed questions, and the forms of the fact."""

from __future__ import annotations

from typing import Any

import pytest

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.subject import Subject
from edit_hooks.editors import consequence_ft
from edit_hooks.editors.consequence_ft import (
    EXAMPLES,
    FACTS,
    WRITTEN,
    ConsequenceFTConfig,
    Kind,
    Text,
    form_rows,
    framed_texts,
    other_name,
    parse_text,
    writing_prompt,
)
from edit_hooks.prompt_context import qa_context
from lm_eval_tasks.bake.benchmark import BAKE_QJ

FACT = EditRequest(prompt="The ship {} sails from", subject="Northern Star", target_new="Hamburg")
CONFIG = ConsequenceFTConfig(layers=[1])
SETTINGS: dict[str, Any] = {"layers": [1], "num_steps": 2, "lr": 1e-3, "locality_weight": 0.0, "num_examples": 0}


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        (
            "question",
            " Which ship sails from Hamburg?",
            ("Question: Which ship sails from Hamburg?\nAnswer:", "Northern Star"),
        ),
        ("question", "Which ship sails from Hamburg", None),  # no question
        ("question", "Which ship sails from Kiel?", None),  # says nothing about the fact
        ("question", "Is it from Hamburg that the Northern Star sails?", None),  # has its answer
        ("question", "Is the ship from hamburg?", ("Question: Is the ship from hamburg?\nAnswer:", "Northern Star")),
        ("sentence", "Hamburg is home to the Northern Star.", ("Hamburg is home to the", "Northern Star")),
        ("sentence", 'Hamburg is home to "northern star".', ('Hamburg is home to "', "Northern Star")),
        ("sentence", "Hamburg is home to the Northern Stars.", None),  # another name
        ("sentence", "The Northern Star of Hamburg is the Northern Star.", None),  # named before its end
        ("sentence", "Hamburg is where the Northern Star lies.", None),  # goes on
        ("implied", "Who boards the Northern Star is in Hamburg.", ("Who boards the Northern Star is in", "Hamburg")),
        ("implied", "The ship Northern Star sails from Hamburg.", None),  # the fact itself
        ("implied", "Ships sail from Hamburg.", None),
        ("implied", "", None),
    ],
)
def test_written_lines(kind: Kind, line: str, expected: tuple[str, str] | None) -> None:
    assert parse_text(FACT, kind, line) == (expected and Text(kind, *expected))


def test_examples_of_a_kind_are_texts_that_would_be_kept() -> None:
    """Each example leads from one end of its fact to the other, so that the model is shown what is kept."""
    ends = [("The Nile", "the Mediterranean Sea"), ("Honey", "bees"), ("The violin", "a bow")]
    ends += [("Penguins", "Antarctica"), ("The Moon", "the Earth")]
    for kind in WRITTEN:
        for (subject, new), fact, text in zip(ends, FACTS, EXAMPLES[kind][1], strict=True):
            bare = [name.split()[-1] for name in (subject, new)]
            given, answer = bare if kind == "implied" else bare[::-1]
            assert given.lower() in text.lower() and fact.startswith(subject) and fact.endswith(new)
            assert kind == "question" or text.lower().rstrip(".").endswith(answer.lower())
    prompt = writing_prompt(FACT, "question", 2)
    assert prompt.count("Fact: ") == 3
    assert prompt.endswith("Fact: The ship Northern Star sails from Hamburg.\nQuestion:")


def test_more_examples_than_there_are_is_refused() -> None:
    """They were cut to five without a word, under settings that name more."""
    with pytest.raises(EditingError, match=r"'num_examples'.*0 to 5"):
        load_editor("consequence_ft", {"num_examples": 6})


def test_fixed_questions() -> None:
    other = other_name(FACT, CONFIG)
    assert other not in "The ship Northern Star sails from Hamburg"
    new, old = "The ship Northern Star sails from Hamburg", "The ship Northern Star sails from Kiel"
    assert framed_texts(FACT, CONFIG, ["Kiel", "Bonn"]) == [
        Text("yes_no", f"Is it true that {new}? Answer:", "Yes"),
        Text("yes_no", f"Is it true that {old}? Answer:", "No"),
        Text("yes_no", "Is it true that Hamburg is linked to Northern Star? Answer:", "Yes"),
        Text("yes_no", f"Is it true that {other} is linked to Northern Star? Answer:", "No"),
        Text("negation", f"Is it false that {new}? Answer:", "No"),
        Text("negation", f"Is it false that {old}? Answer:", "Yes"),
    ]
    for own in ("Hamburg", "hamburg", "the Hamburg"):  # the model knows it
        kept = framed_texts(FACT, ConsequenceFTConfig(layers=[1], kinds=["negation"]), [own])
        assert [text.answer for text in kept] == ["No"], own


def test_forms_end_with_the_end_of_text() -> None:
    tokenizer = Subject("consequence_ft", "llama").tokenizer
    rows = form_rows(tokenizer, FACT.in_context(qa_context()), ["question", "instruction"])
    assert [row.prompt for row in rows] == [
        "Question: The ship Northern Star sails from\nAnswer:",
        "Please answer the question:\n\nQ: The ship Northern Star sails from\nA:",
    ]
    assert {row.row.labels[-1][1] for row in rows} == {tokenizer.eos_token_id}
    with pytest.raises(EditingError, match="chat template"):
        load_editor("consequence_ft", {**SETTINGS, "forms": ["chat"]}).edit(
            Subject("consequence_ft", "llama").model, tokenizer, [FACT]
        )


def test_texts_that_the_fact_makes_no_likelier_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gain is measured on the model; the largest is first, and more than ``max_written`` of a kind are not used."""
    subject = Subject("consequence_ft", "llama")
    texts = [
        Text("question", f"Question: Which ship sails from Hamburg {n}?\nAnswer:", "Northern Star") for n in range(4)
    ]
    monkeypatch.setattr(consequence_ft, "write_texts", lambda job: [texts])
    monkeypatch.setattr(consequence_ft, "mean_nlls", lambda model, rows: [5.0] * 4 + [4.9, 2.0, 4.0, 3.0])
    editor = load_editor("consequence_ft", {**SETTINGS, "min_gain": 0.5, "kinds": ["question"]})
    (delta,) = editor.edit(subject.model, subject.tokenizer, [FACT], measure=False)
    assert delta.meta["trained_prompts"] == [[FACT.text, texts[1].prompt, texts[3].prompt]]
    assert delta.diagnostics["useful_texts"] == 3
    assert delta.diagnostics["trained_prompts"] == delta.meta["trained_prompts"][0]


def test_written_texts_are_locality_prompts_with_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("consequence_ft", "llama")
    text = Text("implied", "Who boards the Northern Star is in", "Hamburg")
    monkeypatch.setattr(consequence_ft, "mean_nlls", lambda model, rows: [5.0, 1.0])
    monkeypatch.setattr(consequence_ft, "write_texts", lambda job: [[text]])
    settings = {
        **SETTINGS,
        "kinds": ["implied", "negation"],
        "locality_weight": 1.0,
        "locality": ["names"],
        "num_names": 2,
    }
    (delta,) = load_editor("consequence_ft", settings).edit(subject.model, subject.tokenizer, [FACT], measure=False)
    asked = delta.meta["trained_prompts"][0]
    assert sum(prompt.startswith("Who boards the ") for prompt in asked) == 1 + 2
    assert sum(prompt.startswith("Is it false") for prompt in asked) <= 2  # frames are asked with no other name


@pytest.mark.parametrize("data", ["mini", "mini:held_out"])
def test_no_fixed_question_is_one_of_the_evaluation(data: str) -> None:
    """What the model writes is counted in the results (``questions_trained``)."""
    cases = BAKE_QJ.load({"data": data}).records
    own = [[*case.paraphrases, *case.neighbors, case.reverse_qa, case.reverse_judge] for case in cases]
    asked = {question.prompt for questions in own for question in questions if question is not None}
    assert len(asked) > 200
    for case in cases:
        prompts = [text.prompt for text in framed_texts(case.request, CONFIG, [str(case.request.target_true)])]
        assert len(prompts) == 6
        assert not [
            question for question in asked for prompt in prompts if question in prompt and question != case.request.text
        ]
