"""Portability: do consequences of an edit hold? And locality by kind, as in KnowEdit.

Sources: Yao et al., Editing Large Language Models: Problems, Methods, and Opportunities (EMNLP 2023); Zhang et al., A
Comprehensive Study of Knowledge Editing for Large Language Models (2024, KnowEdit), and EasyEdit's released summary of
a run: per case the mean over the questions of a kind, then the mean over the kinds that the case has, then over cases.
Wanted answers are scored by TF-MATCH, unrelated ones by AGREE-TF.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edit_hooks.decoding import AskedModel
from lm_eval_tasks.common.asking.answers import Answer
from lm_eval_tasks.common.asking.probes import PLACEHOLDER, CaseAnswers, Probe, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, PARAPHRASE, Case, Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Excluded, Measure, case_mean, mean_over
from lm_eval_tasks.common.settings import Settings

# The kinds of KnowEdit, by their names in its files.
REASONING, LOGICAL, ALIASING = "Reasoning", "Logical_Generalization", "Subject_Aliasing"
# Those of WikiBigEdit: the edit question in other words of one speaker, and a question one hop further.
PERSONA, MULTI_HOP = "Persona", "Multi_Hop"
KINDS = (REASONING, LOGICAL, ALIASING, PERSONA, MULTI_HOP)


@dataclass(frozen=True)
class PortabilityCase(Case):
    """A case with questions about consequences of its edit.

    Attributes:
        portability: kind -> questions whose answers follow from the edit.
        unrelated: kind -> questions whose answers the edit must not change; also in ``neighbors``.
    """

    portability: Mapping[str, Sequence[Question]] = field(default_factory=dict)
    unrelated: Mapping[str, Sequence[Question]] = field(default_factory=dict)


# ------------------------------------------------------------------------ documents


def edit_success_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the edit question."""
    return case_doc(case, _probes({EFFICACY: case.questions(EFFICACY)}), generate=False)


def generalization_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the rephrased questions."""
    return case_doc(case, _probes({PARAPHRASE: case.paraphrases}), generate=False)


def portability_doc(case: PortabilityCase, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the questions of every kind."""
    return case_doc(case, _probes(case.portability), generate=False)


def locality_doc(case: PortabilityCase, settings: Settings) -> dict[str, Any]:
    """Teacher forcing along the answers of unrelated questions of every kind, in both models."""
    return case_doc(case, _probes(case.unrelated, "both"), generate=False)


def _probes(questions: Mapping[str, Sequence[Question]], ask: AskedModel = "edited") -> list[Probe]:
    return [
        Probe(kind=kind, prompt=question.prompt, targets=[question.wanted], gold=question.wanted, ask=ask)
        for kind, asked in questions.items()
        for question in asked
    ]


# -------------------------------------------------------------------------- scoring


def score_edit_success(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TF-MATCH on the edit question."""
    return {"efficacy_match": _kind_mean(answers, EFFICACY, "edit questions", measures.tf_match)}


def score_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TF-MATCH on the rephrased questions."""
    return {"paraphrase_match": _kind_mean(answers, PARAPHRASE, "rephrased questions", measures.tf_match)}


def score_portability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TF-MATCH over the kinds of portability questions that the case has, and by kind.

    As in the released summary, cases without a question of a kind are left out of that kind's mean.
    """
    overall = _mean_over_kinds(answers, "portability questions", measures.tf_match)
    return {"portability_match": overall} | {
        f"portability_{kind.lower()}_match": _if_asked(answers, kind, measures.tf_match) for kind in KINDS
    }


def score_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-TF over the kinds of unrelated questions that the case has, and TF-MATCH against their gold answers."""
    noun = "unrelated questions"
    return {
        "neighborhood_agree_tf": _mean_over_kinds(answers, noun, measures.agree_tf),
        "neighborhood_match": _mean_over_kinds(answers, noun, measures.tf_match),
    }


def _mean_over_kinds(answers: CaseAnswers, noun: str, measure: Callable[[Answer], float]) -> Measure:
    kinds = dict.fromkeys(answered.probe.kind for answered in answers.probes if answered.probe.kind != PLACEHOLDER)
    return lambda: case_mean([_kind_mean(answers, kind, noun, measure)() for kind in kinds], noun)


def _kind_mean(answers: CaseAnswers, kind: str, noun: str, measure: Callable[[Answer], float]) -> Measure:
    return mean_over(answers.of_kind(kind), noun, lambda answered: measure(answered.wanted))


def _if_asked(answers: CaseAnswers, kind: str, measure: Callable[[Answer], float]) -> Measure:
    def value() -> float:
        if not answers.of_kind(kind):
            raise Excluded
        return _kind_mean(answers, kind, f"{kind} questions", measure)()

    return value
