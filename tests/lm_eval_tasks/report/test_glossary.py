"""One name for one protocol: the glossary covers every column, and equal protocols of all benchmarks have one name."""

from __future__ import annotations

import random
from typing import Any

import pytest
from documented_columns import is_documented
from paths import ROOT
from scripted import scored
from task_runs import TASKS, build

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import CaseAnswers, case_requests
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.scoring.measures import evaluate
from lm_eval_tasks.protocols import likelihood, portability, teacher_forcing, token_accuracy
from lm_eval_tasks.report.glossary import FAMILIES, QUESTIONS, SCORES, protocols_of

PROTOCOLS = (
    (likelihood.efficacy_doc, likelihood.score_efficacy),
    (likelihood.paraphrase_doc, likelihood.score_paraphrase),
    (likelihood.neighborhood_doc, likelihood.score_neighborhood),
    (teacher_forcing.reliability_doc, teacher_forcing.score_reliability),
    (teacher_forcing.generalization_doc, teacher_forcing.score_generalization),
    (teacher_forcing.locality_doc, teacher_forcing.score_locality),
    (portability.edit_success_doc, portability.score_edit_success),
    (portability.generalization_doc, portability.score_generalization),
    (portability.locality_doc, portability.score_locality),
    (token_accuracy.efficacy_doc, token_accuracy.score_efficacy),
    (token_accuracy.paraphrase_doc, token_accuracy.score_paraphrase),
    (token_accuracy.specificity_doc, token_accuracy.score_specificity),
)


@pytest.mark.parametrize("task", TASKS)
def test_every_column_has_one_reading_or_a_family(task: str) -> None:
    for metric in build(task, population="wrong_em").config.metric_list:
        name = metric["metric"]
        family = FAMILIES.get(name.partition("_")[0])
        assert len(protocols_of(name)) == (0 if family else 1), name
        if family:
            text = (ROOT / family).read_text(encoding="utf-8")
            assert is_documented(name, text) or is_documented(name.partition("@")[0].removesuffix("_unedited"), text), (
                name
            )


def test_no_two_words_mean_the_same() -> None:
    for words in (QUESTIONS, SCORES):
        assert len({*words.values()}) == len(words)


def a_case(number: int) -> Any:
    unrelated = [
        Question(f"{number} The river of {place} is", "the long Orsa", "the Lind") for place in ("Elna", "Marn")
    ]
    return portability.PortabilityCase(
        request=EditRequest(
            prompt="{} lies in", subject=f"Town {number}", target_new="old Ostmark", target_true="Veldt"
        ),
        paraphrases=[
            Question(f"{number} The town {word}", "old Ostmark", "Veldt") for word in ("is in", "lies within")
        ],
        neighbors=unrelated,
        unrelated={"Relation_Specificity": unrelated},
    )


def test_one_definition_has_one_name_in_every_protocol() -> None:
    """Whatever a model answers: equal values in all draws are one protocol, and one name has equal values."""
    values: dict[str, list[list[float | None]]] = {}
    assert isinstance(a_case(0), Case)
    for doc_of, score in PROTOCOLS:
        found: dict[str, list[float | None]] = {}
        for number in range(12):
            doc = doc_of(a_case(number), {"generate": False})
            answers = []
            for request in case_requests(doc):
                seed = f"{number} {request.probe.prompt} {request.target} {request.probe.token_prompts}"
                draws = [random.Random(f"{seed} {model}") for model in ("edited", "unedited")]
                edited, before = (
                    scored(
                        -3 * draw.random(), [index + draw.randrange(2) for index in range(len(request.target.split()))]
                    )
                    for draw in draws
                )
                answers.append(type(edited)(**{**vars(edited), "unedited": before}))
            for name, measure in score(doc, CaseAnswers(doc, answers)).items():
                found.setdefault(name, []).append(evaluate(measure).value)
        for name, column in found.items():
            if any(value is not None for value in column):
                values.setdefault(name, []).append(column)
    assert len(values["efficacy_match"]) == 4 and len(values["neighborhood_agree_tf"]) == 4
    for name, columns in values.items():
        assert all(column == columns[0] for column in columns), f"{name} is two protocols"
    distinct = {name: tuple(columns[0]) for name, columns in values.items()}
    assert len({*distinct.values()}) == len(distinct), "one protocol has two names"
