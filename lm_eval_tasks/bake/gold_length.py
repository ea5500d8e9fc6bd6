"""BAKE's questions without teacher forcing: greedy tokens, exactly as many as the target has.

The repository of May 2025 (protocol C) scores GRACE this way and all other editors by teacher forcing. It compares the
target's tokens without the space before it; :mod:`lm_eval_tasks.protocols.gold_length` explains the columns
``_unspaced``. Its RJS of GRACE, always 0, has no form here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lm_eval_tasks.bake.benchmark import BakeCase
from lm_eval_tasks.bake.reversal import REVERSE_QA
from lm_eval_tasks.common.asking.probes import CaseAnswers, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.columns import ALL_CASES, over
from lm_eval_tasks.common.scoring.measures import Measure, any_true, exclude_if
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.gold_length import (
    UNSPACED,
    agreement_measure,
    agreement_probes,
    match_measures,
    match_probes,
)
from lm_eval_tasks.protocols.likelihood import PROMPTS


def efficacy_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The target's number of greedy tokens after the edit prompt."""
    return case_doc(case, match_probes(EFFICACY, case.questions(EFFICACY)), generate=True)


def paraphrase_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The same after the paraphrases."""
    return case_doc(case, match_probes(PARAPHRASE, case.questions(PARAPHRASE)), generate=True)


def neighborhood_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The true object's number of tokens after the neighborhood prompts, by both models."""
    return case_doc(case, agreement_probes(NEIGHBORHOOD, case.questions(NEIGHBORHOOD)), generate=True)


def reverse_qa_doc(case: BakeCase, settings: Settings) -> dict[str, Any]:
    """The subject's number of tokens after the reverse question, by both models; the filter needs the unedited one."""
    questions = [] if case.reverse_qa is None else [case.reverse_qa]
    return case_doc(case, match_probes(REVERSE_QA, questions, "both"), generate=True)


def score_efficacy(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AR-MATCH on the edit prompt."""
    return match_measures(answers, EFFICACY, PROMPTS[EFFICACY])


def score_paraphrase(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AR-MATCH on the paraphrases."""
    return match_measures(answers, PARAPHRASE, PROMPTS[PARAPHRASE])


def score_neighborhood(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-AR on the neighborhood prompts."""
    return {"neighborhood_agree_ar": agreement_measure(answers, NEIGHBORHOOD, PROMPTS[NEIGHBORHOOD])}


def score_reverse_qa(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AR-MATCH on the reverse question, with the filter and without (``@all``).

    The filter excludes a case if the unedited model has at least one token of the subject, as that of
    ``reverse_qa_match``.
    """
    scores = match_measures(answers, REVERSE_QA, "reverse question")
    for ending in (UNSPACED, ""):
        name = f"{REVERSE_QA}_ar_match{ending}"
        is_known = partial(any_true, answers.of_kind(REVERSE_QA + ending), _unedited_has_a_token)
        scores |= {name: exclude_if(scores[name], is_known), over(name, ALL_CASES): scores[name]}
    return scores


def _unedited_has_a_token(answered: ProbeAnswers) -> bool:
    return measures.target_match(answered.generation, unedited=True) > 0
