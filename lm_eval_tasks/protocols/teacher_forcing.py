"""Teacher-forced ("synthetic") protocol: the argmax at each target position.

Most editing papers evaluate this way. Source of the definition: Yang et al., The Mirage of Model Editing (ACL 2025) and
its released code. With a population (:mod:`lm_eval_tasks.common.scoring.population`) a case costs one generation more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edit_hooks.decoding import AskedModel
from lm_eval_tasks.common.asking.answers import Answer
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe
from lm_eval_tasks.common.records.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.wild import QUESTIONS, with_helper


def reliability_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the edit question."""
    return _forced_doc(case, settings, EFFICACY)


def generalization_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the rephrased questions."""
    return _forced_doc(case, settings, PARAPHRASE)


def locality_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the unrelated questions, in both models."""
    return _forced_doc(case, settings, NEIGHBORHOOD, "both")


def _forced_doc(case: Case, settings: Settings, kind: str, ask: AskedModel = "edited") -> dict[str, Any]:
    probes = [
        Probe(kind=kind, prompt=question.prompt, targets=[question.wanted], gold=question.wanted, ask=ask)
        for question in case.questions(kind)
    ]
    return with_helper(case, settings, probes, generate=False)


def score_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TF-MATCH on the edit question."""
    return _forced_measures("efficacy_match", answers, EFFICACY, measures.tf_match)


def score_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TF-MATCH on the rephrased questions."""
    return _forced_measures("paraphrase_match", answers, PARAPHRASE, measures.tf_match)


def score_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-TF on the unrelated questions."""
    return _forced_measures("neighborhood_agree_tf", answers, NEIGHBORHOOD, measures.agree_tf)


def _forced_measures(
    metric: str, answers: CaseAnswers, kind: str, measure: Callable[[Answer], float]
) -> dict[str, Measure]:
    return {metric: mean_over(answers.of_kind(kind), QUESTIONS[kind], lambda answered: measure(answered.wanted))}
