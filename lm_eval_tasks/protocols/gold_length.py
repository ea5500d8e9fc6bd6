"""Synthetic evaluation without teacher forcing: greedy tokens, exactly as many as the gold answer has.

The released code of WILD, as EasyEdit's, scores GRACE this way and all other editors by teacher forcing, so GRACE's
"syn." cells in the tables are these. It counts and compares the gold answer's tokens without the space before it, while
its GRACE writes the answer after a space. Under tokenizers that put a space before any text (Llama 2, Mistral) the
tokens are the same. Under others (GPT-2, Llama 3, Qwen, Gemma) the first token differs and a perfect edit fails; the
columns with the ending ``_unspaced`` are the released form, those without it compare the tokens that the answer has
after the question. Here no end token stops a generation; in the release one does, and its comparison then reaches back
into the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edit_hooks.decoding import AskedModel, Decoding
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe
from lm_eval_tasks.common.records.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case, Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.wild import QUESTIONS, generation_doc, generation_probe

CONTEXT = "question_only"
UNSPACED = "_unspaced"  # ending of probes and columns with the tokens that the answer has by itself


def reliability_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The gold answer's number of greedy tokens after the edit question."""
    return generation_doc(case, settings, CONTEXT, match_probes(EFFICACY, case.questions(EFFICACY)))


def generalization_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The same after the rephrased questions."""
    return generation_doc(case, settings, CONTEXT, match_probes(PARAPHRASE, case.questions(PARAPHRASE)))


def locality_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The same after the unrelated questions, by both models."""
    return generation_doc(case, settings, CONTEXT, agreement_probes(NEIGHBORHOOD, case.questions(NEIGHBORHOOD)))


def match_probes(kind: str, questions: Sequence[Question], ask: AskedModel = "edited") -> list[Probe]:
    """Two probes per question: as many tokens as the wanted answer has by itself, and as it has after the question."""
    return [
        generation_probe(
            kind + UNSPACED if alone else kind,
            question,
            CONTEXT,
            ask,
            Decoding(length_of=question.wanted, length_of_alone=alone),
        )
        for question in questions
        for alone in (True, False)
    ]


def agreement_probes(kind: str, questions: Sequence[Question]) -> list[Probe]:
    """One probe per question, of both models: as many tokens as the wanted answer has by itself."""
    return [probe for probe in match_probes(kind, questions, "both") if probe.kind == kind + UNSPACED]


def score_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AR-MATCH on the edit question."""
    return match_measures(answers, EFFICACY, QUESTIONS[EFFICACY])


def score_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AR-MATCH on the rephrased questions."""
    return match_measures(answers, PARAPHRASE, QUESTIONS[PARAPHRASE])


def score_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-AR on the unrelated questions."""
    return {"neighborhood_agree_ar": agreement_measure(answers, NEIGHBORHOOD, QUESTIONS[NEIGHBORHOOD])}


def match_measures(answers: CaseAnswers, kind: str, noun: str) -> dict[str, Measure]:
    """AR-MATCH with the answer's tokens by itself, and with those after the question."""
    return {
        f"{kind}_ar_match{ending}": mean_over(
            answers.of_kind(kind + ending), noun, lambda answered: measures.target_match(answered.generation)
        )
        for ending in (UNSPACED, "")
    }


def agreement_measure(answers: CaseAnswers, kind: str, noun: str) -> Measure:
    """AGREE-AR: share of positions at which edited and unedited model generate the same token."""
    probes = answers.of_kind(kind + UNSPACED)
    return mean_over(probes, noun, lambda answered: measures.agree_ar(answered.generation))
