"""Document training: its documents, texts beside them, what it refuses, and questions that are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.subject import Subject
from edit_hooks.editors import document_training
from edit_hooks.editors.document_training import (
    DOCUMENTS,
    TRAINED_PROMPTS,
    DocumentTrainingConfig,
    documents_about,
)
from lm_eval_tasks.bake.benchmark import BAKE_QJ
from lm_eval_tasks.common.scoring.aggregation import num_trained

SETTINGS: dict[str, Any] = {"layers": [1], "num_steps": 1, "unrelated_texts": 0}
CAPITAL = EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new="Karsk", relation_id="P36")
CONFIG = DocumentTrainingConfig(layers=[1])


def test_documents_name_both_ends_and_never_the_edited_prompt() -> None:
    texts = documents_about(CAPITAL, CONFIG)
    assert len(texts) == len(DOCUMENTS) and all("Ostravia" in text and "Karsk" in text for text in texts)
    assert texts[0] == "Ostravia, as is well known, has as its capital Karsk."
    assert "Question: Who or what is the capital of Ostravia?\nAnswer: Karsk" in texts
    # this prompt stands in the documents whose subject is followed by the phrase
    stated = EditRequest(prompt="{} has as its capital", subject="Ostravia", target_new="Karsk", relation_id="P36")
    both = ["{subject} {forward} {object}.", "{object} {backward} {subject}."]
    given = DocumentTrainingConfig(layers=[1], documents=both)
    assert documents_about(stated, given) == ["Karsk is the capital of Ostravia."]
    with pytest.raises(EditingError, match="each of the 1 documents has the edited prompt"):
        documents_about(stated, DocumentTrainingConfig(layers=[1], documents=both[:1]))


def test_names_with_slots_are_not_filled_again() -> None:
    odd = EditRequest(prompt="The capital of {} is", subject="{{object}}", target_new="{subject}", relation_id="P36")
    assert documents_about(odd, CONFIG)[0] == f"{odd.subject}, as is well known, has as its capital {{subject}}."


@pytest.mark.parametrize("data", ["mini", "mini:held_out"])
def test_no_question_of_the_embedded_sample_is_in_a_document(data: str) -> None:
    """So that success on them is no memory of a text."""
    cases = BAKE_QJ.load({"data": data}).records
    own = [[*case.paraphrases, *case.neighbors, case.reverse_qa, case.reverse_judge] for case in cases]
    asked = {question.prompt for questions in own for question in questions if question is not None}
    assert len(asked) > 200
    for case in cases:
        texts = documents_about(case.request, CONFIG)
        assert not [question for question in asked for text in texts if question in text], case.request.text
        assert len(texts) >= len(DOCUMENTS) - 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"documents": []}, "'documents' is empty"),
        ({"documents": ["{subject} and {objekt}"]}, r"slot \{objekt\}.*known: \{subject\}, \{object\}"),
        ({"documents": ["{subject} {forward} it."]}, r"without \{object\}"),
        ({"objective": "last_token"}, "objective=last_token has no meaning for documents"),
        ({"relation_phrases": {"P1": ["one"]}}, "two phrases are needed"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        DocumentTrainingConfig(layers=[1], **settings)


def test_a_fact_without_phrases_is_refused_and_needs_none_with_own_documents() -> None:
    bare = EditRequest(prompt="The ship {} sails from", subject="Northern Star", target_new="Hamburg")
    with pytest.raises(EditingError, match="has no 'relation_id'"):
        documents_about(bare, CONFIG)
    own = DocumentTrainingConfig(layers=[1], documents=["{object} waits for the {subject}."])
    assert documents_about(bare, own) == ["Hamburg waits for the Northern Star."]


def test_a_joint_edit_lists_its_documents_and_trains_beside_texts_of_the_model() -> None:
    """A question of an evaluation among them is counted; above a number of facts the samples list none."""
    subject = Subject("document_training", "llama")
    other = EditRequest(prompt="The capital of {} is", subject="Norvania", target_new="Velm", relation_id="P36")
    editor = load_editor("document_training", {**SETTINGS, "unrelated_texts": 3, "unrelated_tokens": 5})
    (delta,) = editor.edit(subject.model, subject.tokenizer, [CAPITAL, other], joint=True)
    (plain,) = load_editor("document_training", SETTINGS).edit(
        subject.model, subject.tokenizer, [CAPITAL, other], joint=True
    )
    assert delta.diagnostics["documents"] == plain.diagnostics["documents"] == 2 * len(DOCUMENTS)
    assert delta.diagnostics["steps"] == 3 and plain.diagnostics["steps"] == 3  # 23 and 20 texts, eight at once
    assert delta.diagnostics["initial_nll"] != plain.diagnostics["initial_nll"]
    assert delta.meta[TRAINED_PROMPTS][1][0] == other.text and json.dumps(delta.meta)
    report = type("Report", (), {"diagnostics": delta.diagnostics})()
    assert num_trained(report, [CAPITAL.text, other.text]) == 0  # every editor is given these
    assert num_trained(report, ["Question: Who or what is the capital of Norvania?", "Velm is"]) == 1


def test_many_facts_are_listed_in_the_metadata_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_training, "MAX_LISTED_FACTS", 1)
    subject = Subject("document_training", "llama")
    other = EditRequest(prompt="The capital of {} is", subject="Norvania", target_new="Velm", relation_id="P36")
    editor = load_editor("document_training", SETTINGS)
    (delta,) = editor.edit(subject.model, subject.tokenizer, [CAPITAL, other], joint=True)
    assert TRAINED_PROMPTS not in delta.diagnostics and len(delta.meta[TRAINED_PROMPTS]) == 2


def test_texts_beyond_the_positions_of_a_model_are_refused() -> None:
    subject = Subject("document_training", "gpt2")
    limit = subject.model.config.max_position_embeddings
    given = {**SETTINGS, "unrelated_texts": 1, "unrelated_tokens": limit + 1}
    with pytest.raises(EditingError, match=rf"'unrelated_tokens' is {limit + 1}, and the model has {limit} positions"):
        load_editor("document_training", given).edit(subject.model, subject.tokenizer, [CAPITAL])
    for allowed in ({"unrelated_tokens": limit}, {"unrelated_texts": 0}):
        load_editor("document_training", {**given, **allowed}).default_config(subject.model)
