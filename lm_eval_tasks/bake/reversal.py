"""Reverse questions of BAKE: judge wordings, documents, scorers, and S."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edit_hooks.prompt_context import QUESTION_PREFIX, SPACE, fact_line, statement
from judges.match import alias_match, normalize
from lm_eval_tasks.bake.benchmark import JUDGE_TEMPLATE, JUDGE_TEMPLATES, BakeCase
from lm_eval_tasks.bake.reverse_locality import locality_probes, score_reverse_locality
from lm_eval_tasks.common.asking.documents import of_all_cases
from lm_eval_tasks.common.asking.probes import CaseAnswers, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring import primitives as scoring
from lm_eval_tasks.common.scoring.columns import ALL_CASES, over
from lm_eval_tasks.common.scoring.measures import Measure, Unscored, mean_over
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.likelihood import (
    GENERATE,
    case_measures,
    case_probes,
    contrast_doc,
    contrast_measures,
    contrast_probe,
    edit_score,
    exact_match_measure,
    filter_known,
    logprob_measures,
)

REVERSE_QA, REVERSE_JUDGMENT, ANSWER_IN_PROMPT = "reverse_qa", "reverse_judgment", "reverse_qa_answer_in_prompt"

JUDGE_OPTIONS = ("yes, it is true", "no, it is false")

# Categories of a free answer to a reverse question: it names the edited subject, the original one, both, or neither.
CATEGORIES = ("desired", "original", "ambiguous", "other")


def judge_question(case: BakeCase, template: str) -> Question:
    """The judge question in a wording, with its pair of options.

    For ``raw``, wording and options are those of the record.
    """
    wording = JUDGE_TEMPLATES[template]
    if wording is None:
        return case.reverse_judge
    return Question(wording.replace("{statement}", reversed_statement(case)), *JUDGE_OPTIONS)


def judge_separator(template: str) -> str | None:
    """White space before the options; behind the record's own wording it is that of the record."""
    return None if JUDGE_TEMPLATES[template] is None else SPACE


def reversed_statement(case: BakeCase) -> str:
    """The reversed fact as a sentence.

    It consists of reverse question and subject, or is the judge question without its frame.
    """
    if case.reverse_qa is not None:
        return statement(case.reverse_qa.prompt, case.reverse_qa.wanted, case.request.separator)
    text = case.reverse_judge.prompt.removeprefix("Whether ").removesuffix("?").strip()
    return text[:1].upper() + text[1:]


# ------------------------------------------------------------------------ documents


@of_all_cases
def reverse_qa_docs(cases: Sequence[BakeCase], settings: Settings) -> Iterator[dict[str, Any]]:
    """Documents of bake_rq: the reverse question, and those about other objects.

    The published filter needs the unedited model.
    """
    generate = GENERATE.read(settings)
    for case, further in zip(cases, locality_probes(cases, settings), strict=True):
        questions = [] if case.reverse_qa is None else [case.reverse_qa]
        own = [contrast_probe(REVERSE_QA, question, "both", generate=generate) for question in questions]
        probes = [replace(probe, ask_generation="edited") for probe in own]
        yield case_doc(case, [*probes, *further], generate=generate)


def reverse_judge_doc(case: BakeCase, settings: Settings) -> dict[str, Any]:
    """Document of bake_rj, which also records template and options."""
    template = JUDGE_TEMPLATE.read(settings)
    question = judge_question(case, template)
    doc = contrast_doc(
        case,
        settings,
        REVERSE_JUDGMENT,
        [question],
        ask="both",
        ask_generation="edited",
        separator=judge_separator(template),
    )
    return doc | {"judge_template": template, "judge_options": [question.wanted, question.other]}


def answer_in_prompt_doc(case: BakeCase, settings: Settings) -> dict[str, Any]:
    """Document of bake_rq_answer_in_prompt: the reversed fact, and the question for its subject."""
    questions = [] if case.reverse_qa is None else [case.reverse_qa]
    leaking = [
        Question(
            fact_line(question.prompt, question.wanted, case.request.separator) + QUESTION_PREFIX + question.prompt,
            question.wanted,
            question.other,
        )
        for question in questions
    ]
    return contrast_doc(case, settings, ANSWER_IN_PROMPT, leaking)


def edit_score_doc(case: BakeCase, settings: Settings) -> dict[str, Any]:
    """Document of bake_s: all questions of the case, likelihoods only."""
    probes = case_probes(case)
    if case.reverse_qa is not None:
        probes.append(contrast_probe(REVERSE_QA, case.reverse_qa, "both"))
    template = JUDGE_TEMPLATE.read(settings)
    separator = judge_separator(template)
    probes.append(contrast_probe(REVERSE_JUDGMENT, judge_question(case, template), "both", separator=separator))
    return case_doc(case, probes, generate=False)


# -------------------------------------------------------------------------- scoring


def score_reverse_qa(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """RQS and RQM with and without the filter, log-probabilities, exact match, and the category of the answer."""
    probes, noun = answers.of_kind(REVERSE_QA), "reverse question"
    scores = contrast_measures(REVERSE_QA, probes, noun)
    return filter_known(scores, probes) | _answer_measures(REVERSE_QA, probes, noun)


def score_reverse_questions(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """All measures of bake_rq: those of the reverse question, and RLS."""
    return score_reverse_qa(doc, answers) | score_reverse_locality(answers)


def _answer_measures(prefix: str, probes: Sequence[ProbeAnswers], noun: str) -> dict[str, Measure]:
    """Log-probabilities of both subjects, exact match, and the category of the free answer."""
    categories = {
        f"{prefix}_gen_{name}": mean_over(probes, noun, partial(_is_in_category, name)) for name in CATEGORIES
    }
    return {**logprob_measures(prefix, probes, noun), **exact_match_measure(prefix, probes, noun), **categories}


def _is_in_category(name: str, answered: ProbeAnswers) -> float:
    desired, original = answered.probe.targets
    return float(answer_category(measures.generated_text(answered.generation).text, desired, original) == name)


def score_answer_in_prompt(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The measures of :func:`score_reverse_qa`, without filter, of a question whose answer the prompt states."""
    probes, noun = answers.of_kind(ANSWER_IN_PROMPT), "reverse question"
    scores = contrast_measures(ANSWER_IN_PROMPT, probes, noun)
    return scores | _answer_measures(ANSWER_IN_PROMPT, probes, noun)


def answer_in_prompt_name(column: str) -> str:
    """The column of bake_rq_answer_in_prompt that corresponds to one of bake_rq."""
    return ANSWER_IN_PROMPT + column.removeprefix(REVERSE_QA)


def answer_category(text: str, desired: str, original: str) -> str:
    """The category of a free answer to a reverse question (figure 5 of BAKE), one of :data:`CATEGORIES`.

    An answer names a subject if it contains its words in a row (:func:`judges.match.alias_match`). It is ambiguous if
    it names both, also where one name is part of the other.

    Raises:
        Unscored: if a subject has no words after normalization, which no answer could contain.
    """
    for subject in (desired, original):
        if not normalize(subject):
            raise Unscored(f"the answer {subject!r} has no words that a free answer could contain")
    named = alias_match(text, [desired]), alias_match(text, [original])
    return {(True, False): "desired", (False, True): "original", (True, True): "ambiguous"}.get(named, "other")


def score_reverse_judge(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """RJS and RJM with and without the published filter, and a generated "yes"."""
    probes, noun = answers.of_kind(REVERSE_JUDGMENT), "judge question"
    scores = contrast_measures(REVERSE_JUDGMENT, probes, noun)
    return filter_known(scores, probes) | {"reverse_judgment_gen_yes": mean_over(probes, noun, _begins_with_yes)}


def _begins_with_yes(answered: ProbeAnswers) -> float:
    return float(scoring.first_word(measures.generated_text(answered.generation).text) == "yes")


def score_edit_score(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """S of BAKE under each protocol.

    Its factors are ES, GS, LS and the mean of RQS and RJS (RJS alone without reverse questions).
    """
    scores = case_measures(doc, answers) | score_reverse_qa(doc, answers) | score_reverse_judge(doc, answers)
    reverse = [REVERSE_QA, REVERSE_JUDGMENT] if answers.of_kind(REVERSE_QA) else [REVERSE_JUDGMENT]

    def of_protocol(protocol: str, locality: str, population: str = "") -> Measure:
        forward = [[f"efficacy_{protocol}"], [f"paraphrase_{protocol}"], [f"neighborhood_{locality}"]]
        names = [f"{kind}_{protocol}" for kind in reverse]
        return edit_score(scores, [*forward, [over(name, population) if population else name for name in names]])

    return {
        "edit_score_reverse_prob": of_protocol("prob", "prob"),
        "edit_score_reverse_prob_agree": of_protocol("prob", "agree_tf"),
        "edit_score_reverse_prob@all": of_protocol("prob", "prob", ALL_CASES),
        "edit_score_reverse_argmax": of_protocol("argmax", "argmax"),
        "edit_score_reverse_argmax@all": of_protocol("argmax", "argmax", ALL_CASES),
        "edit_score_reverse_match": of_protocol("match", "agree_tf"),
        "edit_score_reverse_match@all": of_protocol("match", "agree_tf", ALL_CASES),
    }
