"""Synthetic evaluation without teacher forcing: greedy tokens, exactly as many as the gold answer has.

The released code of WILD, as EasyEdit's, scores GRACE this way and all other editors by teacher forcing, so GRACE's
"syn." cells in the tables are these. It counts and compares the gold answer's tokens without the space before it. Here
no end token stops a generation; in the release one does, and its comparison then reaches back into the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edit_hooks.decoding import AskedModel, Decoding
from lm_eval_tasks.common import measures
from lm_eval_tasks.common.answers import Answer
from lm_eval_tasks.common.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case
from lm_eval_tasks.common.measures import Measure, mean_over
from lm_eval_tasks.common.probes import CaseAnswers
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.wild import QUESTIONS, generation_doc, generation_probe

CONTEXT = "question_only"


def reliability_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The gold answer's number of greedy tokens after the edit question."""
    return _doc(case, settings, EFFICACY)


def generalization_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The same after the rephrased questions."""
    return _doc(case, settings, PARAPHRASE)


def locality_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The same after the unrelated questions, by both models."""
    return _doc(case, settings, NEIGHBORHOOD, "both")


def _doc(case: Case, settings: Settings, kind: str, ask: AskedModel = "edited") -> dict[str, Any]:
    probes = [
        generation_probe(kind, question, CONTEXT, ask, Decoding(length_of=question.wanted, length_of_alone=True))
        for question in case.questions(kind)
    ]
    return generation_doc(case, settings, CONTEXT, probes)


def score_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AR-MATCH on the edit question."""
    return _measures("reliability_syn_ar_match", answers, EFFICACY, measures.target_match)


def score_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AR-MATCH on the rephrased questions."""
    return _measures("generalization_syn_ar_match", answers, PARAPHRASE, measures.target_match)


def score_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-AR on the unrelated questions."""
    return _measures("locality_syn_agree_ar", answers, NEIGHBORHOOD, measures.agree_ar)


def _measures(
    metric: str, answers: CaseAnswers, kind: str, measure: Callable[[Answer | None], float]
) -> dict[str, Measure]:
    return {metric: mean_over(answers.of_kind(kind), QUESTIONS[kind], lambda answered: measure(answered.generation))}
