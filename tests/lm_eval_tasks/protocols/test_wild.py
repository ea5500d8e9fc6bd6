"""WILD protocol by hand, on QAEdit's tasks, and its documents on plain cases."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedLM
from task_runs import build, metrics_of, run

from edit_hooks.answers import GeneratedText
from edit_hooks.request import EditRequest
from edit_hooks.utils import logs
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.protocols import wild


def test_reliability_by_hand() -> None:
    generations = {
        "Who designed the Fenwick aqueduct?": " Orsa Lind. She",
        "In which city was the painter Jo Marsh born?": " St. Brannock",  # the stop rule cuts "St"
        "Which mark closes the third stanza of Pim's Ode?": ")",  # a gold answer without words is never matched
        "What year did the Halden tram start running?": " 1911\nQ:",
    }

    def texts(context: str, unedited: bool) -> str:
        head, question, tail = context.partition("Q: ")[0], *context.partition("Q: ")[2].split("\n")
        assert (head, tail) == ("Please answer the question:\n\n", "A:")
        return " 1911." if unedited else generations[question]

    found = metrics_of(run("qaedit_wild_reliability", ScriptedLM(texts=texts)), "qaedit_wild_reliability")
    assert found["efficacy_wild_em"] == 0.5
    # the unedited model answers the last question rightly
    assert found["efficacy_wild_em@wrong_em"] == pytest.approx(1 / 3)
    assert found["efficacy_wild_em@wrong_em_n"] == 3
    assert found["efficacy_wild_em@wrong_em_excluded"] == 1


def test_answers_in_another_script(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published exact match is for English, and a warning says so; our columns and populations are right."""
    monkeypatch.setattr(logs, "_warned", set())
    right, wrong, twice = (GeneratedText(raw=text) for text in ("罗马。", "巴黎。", "罗马、罗马"))
    assert measures.generated_squad_match(right, "罗马") == 0.0
    assert [measures.generated_match(answer, "罗马") for answer in (right, wrong)] == [1.0, 0.0]
    assert [measures.generated_contains(answer, "罗马") for answer in (right, wrong)] == [1.0, 0.0]
    assert [measures.goes_on(answer, "罗马") for answer in (right, wrong, twice)] == [0.0, 0.0, 1.0]
    assert measures.repeats(twice, "罗马") == 1.0
    assert [record.message for record in caplog.records if "made for English" in record.message]


@pytest.mark.parametrize(
    ("context", "prompt"),
    [
        ("qa_inst", "Please answer the question:\n\nQ: who founded the Orrin press\nA:"),
        ("qa_inst_single_newline", "Please answer the question:\nQ: who founded the Orrin press\nA:"),
        ("question_only", "who founded the Orrin press"),
        (
            "chat_template_released",
            "<s>[INST] <<SYS>>\nYou are a helpful, respectful and honest assistant.\n<</SYS>>\n\n"
            "who founded the Orrin press [/INST]</s>",
        ),
        ("请回答\n问: {question}\n答:", "请回答\n问: who founded the Orrin press\n答:"),
    ],
)
def test_contexts(context: str, prompt: str) -> None:
    doc = build("qaedit_wild_locality", wild_context=context).test_docs()[3]
    assert doc["probes"][0]["prompt"] == prompt
    assert doc["probes"][0]["question"] == "who founded the Orrin press"


@pytest.mark.parametrize("options", [{"apply_chat_template": True}, {"system_instruction": "Be brief."}])
@pytest.mark.parametrize("task", ["qaedit_wild_locality", "qaedit_grid_cell"])
def test_the_released_chat_is_not_put_into_another(task: str, options: dict[str, Any]) -> None:
    lm = ScriptedLM()
    with pytest.raises(EditingError, match=r"wild_context=chat_template_released writes a chat .* drop --apply_chat"):
        run(task, lm, {"wild_context": "chat_template_released"}, **options)
    assert not lm.seen
    run(task, lm, {"wild_context": "chat_template_released", "population": "all"})
    assert all(request.args[0].endswith(" [/INST]</s>") for request in lm.seen)


@pytest.mark.parametrize(("context", "text"), [("question_only", "{}"), ("qa_inst", "Please answer the question:")])
def test_the_own_chat_template_of_a_model_takes_any_other_context(context: str, text: str) -> None:
    lm = ScriptedLM()
    run("qaedit_wild_locality", lm, {"wild_context": context}, apply_chat_template=True, limit=1)
    own, helper = (request.args[0] for request in lm.seen)
    question = "when did the salt canal open" if context == "question_only" else text
    assert own.startswith(f"<user>{question}") and own.endswith("<assistant>")
    assert helper.startswith("<user>Please answer the question:" if text != "{}" else "<user>Who designed")


@pytest.mark.parametrize("context", ["chat", "{question} {question}", ["{question}"], ""])
def test_an_unknown_context_is_an_error(context: Any) -> None:
    with pytest.raises(EditingError, match=r"wild_context=.* is unknown"):
        build("qaedit_wild_locality", wild_context=context)


def test_a_context_that_no_tokenizer_can_encode_is_an_error() -> None:
    with pytest.raises(EditingError, match="half of a surrogate pair"):
        build("qaedit_wild_locality", wild_context="\ud800 {question}")


def test_a_question_in_its_own_language_draws_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    probe = wild.generation_probe("efficacy", Question("意大利的首都在哪里", "罗马"), "问: {question}\n答:")
    assert probe.prompt == "问: 意大利的首都在哪里\n答:" and not caplog.records


def test_locality_compares_all_tokens_and_reports_empty_pairs() -> None:
    def texts(context: str, unedited: bool) -> str:
        if "river" in context:
            return "\n"  # neither model writes anything: they agree
        return " 1874. Same start" if "canal" in context and unedited else " 1874. Other end"

    found = metrics_of(run("qaedit_wild_locality", ScriptedLM(texts=texts)), "qaedit_wild_locality")
    assert found["neighborhood_wild_agree_gen"] == 0.75
    assert found["neighborhood_wild_both_empty"] == 0.25


def test_several_paraphrases_share_one_helper_probe() -> None:
    request = EditRequest(prompt="Where is {}?", subject="Velm", target_new="Karsk", case_id="0")
    case = Case(request, paraphrases=[Question("Velm is where?", "Karsk"), Question("In what is Velm?", "Karsk")])
    doc = wild.generalization_doc(case, {"population": "wrong_em"})
    assert [probe["kind"] for probe in doc["probes"]] == ["paraphrase", "paraphrase", "pre_edit"]
    assert [probe["ask"] for probe in doc["probes"]] == ["edited", "edited", "unedited"]
    assert doc["probes"][2]["question"] == "Where is Velm?"
    plain = wild.generalization_doc(case, {})
    assert [probe["kind"] for probe in plain["probes"]] == ["paraphrase", "paraphrase"]


def test_a_case_without_such_a_question_has_a_placeholder_and_no_helper() -> None:
    request = EditRequest(prompt="Where is {}?", subject="Velm", target_new="Karsk", case_id="0")
    doc = wild.locality_doc(Case(request), {})
    assert [probe["kind"] for probe in doc["probes"]] == ["placeholder"]


@pytest.mark.parametrize("benchmark", ["zsre", "counterfact_flat"])
def test_the_question_alone_is_asked_and_scored_up_to_its_stop(benchmark: str) -> None:
    """A right answer that goes on is no exact match; without an end token in the target most do."""
    task = f"{benchmark}_question_only_reliability"
    golds = {doc["probes"][0]["prompt"]: doc["probes"][0]["gold"] for doc in build(task).test_docs()}
    first = next(iter(golds))

    def texts(context: str, unedited: bool) -> str:
        return f" {golds[context]} and more" if context == first else f" {golds[context]}."

    lm = ScriptedLM(texts=texts)
    found = metrics_of(run(task, lm), task)
    assert {request.args[0] for request in lm.seen} == set(golds)  # no instruction
    assert found["efficacy_gen_em"] == pytest.approx(1 - 1 / len(golds))
    assert found["efficacy_gen_goes_on"] == pytest.approx(1 / len(golds))


def test_the_question_alone_has_no_other_context() -> None:
    with pytest.raises(EditingError, match="wild_context=qa_inst for a task whose name has question_only"):
        build("zsre_question_only_locality", wild_context="qa_inst").test_docs()
