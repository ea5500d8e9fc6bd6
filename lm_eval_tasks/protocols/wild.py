"""WILD protocol: free generation after an instruction, up to a natural stop.

Source: Yang et al., The Mirage of Model Editing: Revisiting Evaluation in the Wild (ACL 2025) and its released code.

The published results cover only the cases whose edit question the unedited model answers wrongly, in the judge's
opinion. With the setting ``initially_wrong`` a document has a helper probe for that, and every metric a second column,
``_initially_wrong``: judged metrics as published, all others by exact match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edit_hooks.decoding import AskedModel
from edit_hooks.prompt_context import QA_INSTRUCTION
from lm_eval_tasks.common import measures
from lm_eval_tasks.common.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case, Question
from lm_eval_tasks.common.measures import Measure, exclude_if, mean_over
from lm_eval_tasks.common.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.settings import Settings, choice_setting, switch_setting

# `qa_inst` is that of the released code, with a blank line; the figure of the paper shows a single newline.
CONTEXTS = {
    "qa_inst": QA_INSTRUCTION,
    "qa_inst_single_newline": "Please answer the question:\nQ: {question}\nA:",
    "question_only": "{question}",
}

WILD_CONTEXT = choice_setting("wild_context", "context of a free generation", list(CONTEXTS))
INITIALLY_WRONG = switch_setting(
    "initially_wrong",
    "also report the cases that the unedited model answers wrongly (the published subset)",
    default=True,
)

PRE_EDIT = "pre_edit"  # kind of the helper probe that tests whether the unedited model answers correctly

# Plural nouns for the reason of a case without such questions.
QUESTIONS = {EFFICACY: "edit questions", PARAPHRASE: "rephrased questions", NEIGHBORHOOD: "unrelated questions"}


# ------------------------------------------------------------------------ documents


def reliability_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Free generation on the edit question."""
    return _generation_doc(case, settings, EFFICACY)


def generalization_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Free generation on the rephrased questions."""
    return _generation_doc(case, settings, PARAPHRASE)


def locality_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Free generation on the unrelated questions, by both models."""
    return _generation_doc(case, settings, NEIGHBORHOOD, "both")


def _generation_doc(case: Case, settings: Settings, kind: str, ask: AskedModel = "edited") -> dict[str, Any]:
    probes = [generation_probe(kind, question, settings, ask) for question in case.questions(kind)]
    return initially_wrong_doc(case, settings, probes, generate=True)


def initially_wrong_doc(case: Case, settings: Settings, probes: Sequence[Probe], *, generate: bool) -> dict[str, Any]:
    """A document, with the helper probe of the published filter if that is on.

    The setting is :data:`INITIALLY_WRONG`.
    """
    if probes and INITIALLY_WRONG.read(settings):
        (question,) = case.questions(EFFICACY)
        probes = [*probes, generation_probe(PRE_EDIT, question, settings, "unedited")]
    return case_doc(case, probes, generate=generate)


def generation_probe(kind: str, question: Question, settings: Settings, ask: AskedModel = "edited") -> Probe:
    """A probe that generates the answer to a question.

    The setting :data:`WILD_CONTEXT` selects the context.
    """
    context = CONTEXTS[WILD_CONTEXT.read(settings)]
    return Probe(
        kind=kind,
        prompt=context.replace("{question}", question.prompt),
        generate=True,
        gold=question.wanted,
        question=question.prompt,
        ask=ask,
    )


# -------------------------------------------------------------------------- scoring


def score_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """EM on the edit question, and whether the generation contains the gold answer."""
    return _gold_measures("reliability_wild", answers, EFFICACY)


def score_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """EM on the rephrased questions, and containment of the gold answer."""
    return _gold_measures("generalization_wild", answers, PARAPHRASE)


def score_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-GEN on the unrelated questions, and the share of pairs of empty answers."""
    probes, noun = answers.of_kind(NEIGHBORHOOD), QUESTIONS[NEIGHBORHOOD]
    agreement = mean_over(probes, noun, lambda answered: measures.agree_gen(answered.generation))
    both_empty = mean_over(probes, noun, lambda answered: measures.both_empty(answered.generation))
    return with_initially_wrong("locality_wild_agree_gen", agreement, answers) | {
        "locality_wild_both_empty": both_empty
    }


def _gold_measures(prefix: str, answers: CaseAnswers, kind: str) -> dict[str, Measure]:
    probes, noun = answers.of_kind(kind), QUESTIONS[kind]

    def exact_match(answered: ProbeAnswers) -> float:
        return measures.generated_match(answered.generation, answered.probe.gold)

    def contains(answered: ProbeAnswers) -> float:
        return measures.generated_contains(answered.generation, answered.probe.gold)

    return with_initially_wrong(f"{prefix}_em", mean_over(probes, noun, exact_match), answers) | {
        f"{prefix}_contains": mean_over(probes, noun, contains)
    }


def with_initially_wrong(metric: str, measure: Measure, answers: CaseAnswers) -> dict[str, Measure]:
    """A metric over all cases, and over those that the unedited model answers wrongly.

    Here that is decided by exact match; judged metrics have the judge's own decision, as the published results.
    """

    def is_known() -> float:
        (helper,) = answers.of_kind(PRE_EDIT)
        return measures.generated_match(helper.generation, helper.probe.gold, unedited=True)

    return {metric: measure, f"{metric}_initially_wrong": exclude_if(measure, is_known)}
