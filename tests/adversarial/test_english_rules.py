"""One warning where a rule that was made for English meets other text, and none for English."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.editors.ike import IKE, IKEConfig
from edit_hooks.in_context.scope_classifier import fact_text
from edit_hooks.locate.context_templates import warn_of_english
from edit_hooks.utils import logs
from edit_hooks.utils.text.scripts import is_latin
from lm_eval_tasks.common.asking.generation import stops_of_scripts
from lm_eval_tasks.common.records.cases import Question
from lm_eval_tasks.protocols.wild import generation_probe
from lm_eval_tasks.protocols.wordings import CLOZE, state

ENGLISH = EditRequest(prompt="The capital of Norway is", subject="Norway", target_new="Lima")
CHINESE = EditRequest(prompt="挪威的首都是", subject="挪威", target_new="利马")
TEMPLATES = ["{}", "The band released. {}"]


def demonstrations(request: EditRequest) -> None:
    editor = IKE({"embedder": "words", "num_demonstrations": 2})
    editor.edit(build_model("llama"), build_tokenizer("byte_bpe_bos"), [request])
    assert editor.config_class is IKEConfig


RULES: dict[str, Any] = {
    "the context templates of rome": lambda request: warn_of_english(TEMPLATES, [request], "rome"),
    "the built-in demonstrations of ike": demonstrations,
    "scope_texts: released": lambda request: fact_text("released", "", request.text + request.continuation, "[SEP]"),
    "the instruction of wild_context=qa_inst": lambda request: generation_probe(
        "efficacy", Question(request.text, request.target_new), "qa_inst"
    ),
    "wordings of judgments, negations and options": lambda request: state(CLOZE, request.text, request.target_new),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_for_english_warns_once_of_other_text(
    rule: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    with caplog.at_level(logging.WARNING):
        RULES[rule](ENGLISH)
        assert "made for English" not in caplog.text
        RULES[rule](CHINESE)
        RULES[rule](CHINESE)
    (message,) = [record.getMessage() for record in caplog.records if "made for English" in record.getMessage()]
    assert message.startswith(f"{rule}: ") and "挪威的首都是" in message
    assert message.count(".") >= 2  # a remedy


def test_a_script_without_marks_has_no_sentence_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    with caplog.at_level(logging.WARNING):
        assert stops_of_scripts([".", "\n"], "挪威的首都是", "利马") != [".", "\n"]
        assert not caplog.records
        assert stops_of_scripts([".", "\n"], "เมืองหลวงของฝรั่งเศสคือ", "โรม") == [".", "\n"]
        assert stops_of_scripts(["\n"], "挪威的首都是", "利马") == ["\n"]  # a protocol without a period
    (record,) = caplog.records
    assert "the stop rule of free answers" in record.getMessage() and "--gen_kwargs" in record.getMessage()


def test_templates_of_the_language_of_the_facts_are_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    with caplog.at_level(logging.WARNING):
        warn_of_english(["{}", "他说。{}"], [CHINESE], "rome")
        warn_of_english(["{}"], [CHINESE], "rome")
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Élan vital", True), ("1 + 1", True), ("", True), ("Столица", False), ("北京市 is", False), ("日 capital", True)],
)
def test_latin_texts_are_those_with_mostly_latin_letters(text: str, expected: bool) -> None:
    assert is_latin(text) is expected


@pytest.mark.parametrize(("answer", "end"), [("利马", "."), ("利马。", ""), ("Lima.", "")])
def test_a_statement_ends_in_one_period_of_any_script(answer: str, end: str) -> None:
    assert state(CLOZE, CHINESE.text, answer) == f"挪威的首都是{answer}{end}"
