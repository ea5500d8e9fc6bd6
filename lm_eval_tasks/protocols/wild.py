"""WILD protocol: free generation after an instruction, up to a natural stop.

Source: Yang et al., The Mirage of Model Editing: Revisiting Evaluation in the Wild (ACL 2025) and its released code.

The published results of QAEdit are over the cases whose edit question the unedited model answers wrongly; see
:mod:`lm_eval_tasks.common.scoring.population`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from edit_hooks.decoding import AskedModel, Decoding
from edit_hooks.prompt_context import QA_INSTRUCTION, QUESTION_SLOT
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.text.scripts import warn_of_english_rule
from lm_eval_tasks.common.asking.probes import OWN_CHAT, CaseAnswers, Probe, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case, Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.columns import ALL_CASES
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.scoring.population import POPULATION, PRE_EDIT
from lm_eval_tasks.common.settings import Settings, context_setting

logger = get_logger("lm_eval.editing_tasks")

# `qa_inst` is that of the released code, with a blank line; the figure of the paper shows a single newline.
# `chat_template_released` is the release's `chat_temp`: Llama-2's template for any model, an end token at its end.
RELEASED_CHAT = "chat_template_released"
QUESTION_ONLY = "question_only"
CONTEXTS = {
    "qa_inst": QA_INSTRUCTION,
    "qa_inst_single_newline": "Please answer the question:\nQ: {question}\nA:",
    QUESTION_ONLY: "{question}",
    RELEASED_CHAT: (
        "<s>[INST] <<SYS>>\nYou are a helpful, respectful and honest assistant.\n<</SYS>>\n\n{question} [/INST]</s>"
    ),
}

WILD_CONTEXT = context_setting("wild_context", "context of the questions", CONTEXTS)
# All settings that a benchmark with tasks of this protocol or of the synthetic one declares.
WILD_SETTINGS = (WILD_CONTEXT, POPULATION)

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
    context = WILD_CONTEXT.read(settings)
    probes = [generation_probe(kind, question, context, ask) for question in case.questions(kind)]
    return generation_doc(case, settings, context, probes)


def generation_doc(case: Case, settings: Settings, context: str, probes: Sequence[Probe]) -> dict[str, Any]:
    """A document of generations in a context, with the helper probe that a population needs."""
    return with_helper(case, settings, probes, context, generate=True)


def with_helper(
    case: Case, settings: Settings, probes: Sequence[Probe], context: str | None = None, *, generate: bool
) -> dict[str, Any]:
    """The document of a case, with the helper probe if the setting :data:`POPULATION` needs it.

    Args:
        context: that of the probes, if it is one of WILD's. The helper asks in the run's.
        generate: as for :func:`case_doc`.
    """
    contexts = {context}
    if probes and POPULATION.read(settings) != ALL_CASES:
        (question,) = case.questions(EFFICACY)
        contexts.add(asked := WILD_CONTEXT.read(settings))
        probes = [*probes, generation_probe(PRE_EDIT, question, asked, "unedited")]
    doc = case_doc(case, probes, generate=generate)
    return doc | ({OWN_CHAT: f"wild_context={RELEASED_CHAT}"} if RELEASED_CHAT in contexts else {})


def generation_probe(
    kind: str, question: Question, context: str, ask: AskedModel = "edited", decoding: Decoding | None = None
) -> Probe:
    """A probe that generates the answer to a question in one of :data:`CONTEXTS`, or in a text of the user."""
    if context in CONTEXTS and context != QUESTION_ONLY:
        remedy = f"Others: --metadata wild_context={QUESTION_ONLY}, or your own text with {QUESTION_SLOT}."
        warn_of_english_rule(logger, f"the instruction of wild_context={context}", [question.prompt], remedy)
    return Probe(
        kind=kind,
        prompt=CONTEXTS.get(context, context).replace(QUESTION_SLOT, question.prompt),
        generate=True,
        gold=question.wanted,
        question=question.prompt,
        ask=ask,
        decoding=decoding,
    )


def question_only_reliability_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Free generation on the edit question, without an instruction."""
    require_context(settings, QUESTION_ONLY)
    return reliability_doc(case, settings)


def question_only_generalization_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Free generation on the rephrased questions, without an instruction."""
    require_context(settings, QUESTION_ONLY)
    return generalization_doc(case, settings)


def question_only_locality_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Free generation on the unrelated questions, without an instruction, by both models."""
    require_context(settings, QUESTION_ONLY)
    return locality_doc(case, settings)


def require_context(settings: Settings, context: str) -> None:
    """Refuse another context than that of a task's columns.

    Raises:
        EditingError: names both.
    """
    if (chosen := WILD_CONTEXT.read(settings)) != context:
        raise EditingError(
            f"wild_context={chosen} for a task whose name has {context}. Drop the setting; the tasks with _wild_ in "
            "their name read it."
        )


# -------------------------------------------------------------------------- scoring

TextScore: TypeAlias = Callable[[Any, str], float]  # of a generation and the gold text
WILD_SCORES: Mapping[str, TextScore] = {
    "wild_em": measures.generated_squad_match,
    "wild_contains": measures.generated_contains,
}
QUESTION_ONLY_SCORES: Mapping[str, TextScore] = {
    "gen_em": measures.generated_match,
    "gen_goes_on": measures.goes_on,
}


def score_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """EM on the edit question, and whether the generation contains the gold answer."""
    return _text_measures(answers, EFFICACY, WILD_SCORES)


def score_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """EM on the rephrased questions, and containment of the gold answer."""
    return _text_measures(answers, PARAPHRASE, WILD_SCORES)


def score_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-GEN on the unrelated questions, and the share of pairs of empty answers."""
    probes, noun = answers.of_kind(NEIGHBORHOOD), QUESTIONS[NEIGHBORHOOD]
    agreement = mean_over(probes, noun, lambda answered: measures.agree_gen(answered.generation))
    both_empty = mean_over(probes, noun, lambda answered: measures.both_empty(answered.generation))
    return {"neighborhood_wild_agree_gen": agreement, "neighborhood_wild_both_empty": both_empty}


def score_question_only_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """EM on the edit question, and what follows a right beginning."""
    return _text_measures(answers, EFFICACY, QUESTION_ONLY_SCORES)


def score_question_only_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """EM on the rephrased questions, and what follows a right beginning."""
    return _text_measures(answers, PARAPHRASE, QUESTION_ONLY_SCORES)


def score_question_only_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-GEN on the unrelated questions."""
    probes, noun = answers.of_kind(NEIGHBORHOOD), QUESTIONS[NEIGHBORHOOD]
    return {"neighborhood_agree_gen": mean_over(probes, noun, lambda answered: measures.agree_gen(answered.generation))}


def _text_measures(answers: CaseAnswers, kind: str, scores: Mapping[str, TextScore]) -> dict[str, Measure]:
    """Scores of the generated answers against the gold texts, by the end of their names."""
    probes, noun = answers.of_kind(kind), QUESTIONS[kind]

    def measure(score: TextScore) -> Measure:
        return mean_over(probes, noun, lambda answered: score(answered.generation, answered.probe.gold))

    return {f"{kind}_{name}": measure(score) for name, score in scores.items()}
