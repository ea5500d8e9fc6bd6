"""Likelihood protocol: the wanted target against another one.

Cloze benchmarks such as BAKE and CounterFact use it.

A task measures a question in several ways, each with its own suffix in the metric's name: ``_prob`` (wanted target
strictly more likely per token), ``_argmax`` (every teacher-forced argmax right), ``_match`` (share of them),
``_agree_tf`` and ``_agree_gen`` (agreement with the unedited model), ``_gen_em`` (free generation, exact match).

A benchmark whose cases have competing answers uses the documents and scorers here unchanged; for further kinds of
questions, or another edit score, it combines :func:`contrast_doc`, :func:`contrast_measures` and :func:`edit_score`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edit_hooks.decoding import AskedModel
from lm_eval_tasks.common import measures
from lm_eval_tasks.common.cases import EFFICACY, KINDS, NEIGHBORHOOD, PARAPHRASE, Case, Question
from lm_eval_tasks.common.measures import Measure, Score, Unscored, evaluate, exclude_if, mean_over
from lm_eval_tasks.common.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.settings import Settings, switch_setting

GENERATE = switch_setting(
    "generate", "also generate answers, for the *_gen_* and *_agree_gen columns; false: likelihoods only", default=True
)

# Plural nouns for the reason of a case without such questions.
PROMPTS = {EFFICACY: "edit prompts", PARAPHRASE: "paraphrase prompts", NEIGHBORHOOD: "neighborhood prompts"}


# ------------------------------------------------------------------------ documents


def efficacy_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of the edit prompt: new against true object."""
    return contrast_doc(case, settings, EFFICACY, case.questions(EFFICACY))


def paraphrase_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of all paraphrases of the case: new against true object."""
    return contrast_doc(case, settings, PARAPHRASE, case.paraphrases)


def neighborhood_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of all neighbors of the case: true against new object.

    Agreement needs the unedited model.
    """
    return contrast_doc(case, settings, NEIGHBORHOOD, case.neighbors, ask="both")


def edit_score_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of all questions that S needs, likelihoods only."""
    return case_doc(case, case_probes(case), generate=False)


def contrast_doc(
    case: Case,
    settings: Settings,
    kind: str,
    questions: Iterable[Question],
    *,
    ask: AskedModel = "edited",
    ask_generation: AskedModel | None = None,
) -> dict[str, Any]:
    """The document of one kind of questions.

    The model also generates an answer unless the setting :data:`GENERATE` is off.

    Args:
        ask: the model that scores the targets.
        ask_generation: the model that generates, if that is another one.
    """
    generate = GENERATE.read(settings)
    probes = [contrast_probe(kind, question, ask, generate=generate) for question in questions]
    return case_doc(case, [replace(probe, ask_generation=ask_generation) for probe in probes], generate=generate)


def case_probes(case: Case) -> list[Probe]:
    """Probes of all standard questions of a case, without generation; locality needs the unedited model."""
    return [
        contrast_probe(kind, question, "both" if kind == NEIGHBORHOOD else "edited")
        for kind in KINDS
        for question in case.questions(kind)
    ]


def contrast_probe(kind: str, question: Question, ask: AskedModel = "edited", *, generate: bool = False) -> Probe:
    """A probe that scores the wanted answer and, where there is one, its competitor."""
    targets = (question.wanted,) if question.other is None else (question.wanted, question.other)
    return Probe(kind=kind, prompt=question.prompt, targets=targets, generate=generate, gold=question.wanted, ask=ask)


# -------------------------------------------------------------------------- scoring


def score_efficacy(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """ES and its magnitude EM on the edit prompt."""
    probes, noun = answers.of_kind(EFFICACY), PROMPTS[EFFICACY]
    return contrast_measures("es", "em", probes, noun) | exact_match_measure("es", probes, noun)


def score_paraphrase(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """GS and its magnitude PM, averaged over all paraphrases of the case."""
    probes, noun = answers.of_kind(PARAPHRASE), PROMPTS[PARAPHRASE]
    return contrast_measures("gs", "pm", probes, noun) | exact_match_measure("gs", probes, noun)


def score_neighborhood(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """LS and its magnitude NM on all neighbors, and agreement with the unedited model."""
    probes, noun = answers.of_kind(NEIGHBORHOOD), PROMPTS[NEIGHBORHOOD]
    return contrast_measures("ls", "nm", probes, noun) | {
        "ls_agree_tf": mean_over(probes, noun, lambda answered: measures.agree_tf(answered.wanted)),
        "ls_agree_gen": mean_over(probes, noun, lambda answered: measures.agree_gen(answered.generation)),
    }


def score_edit_score(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """S of efficacy, paraphrases and neighborhood under each protocol (ROME; MEMIT)."""
    scores = case_measures(doc, answers)
    return {
        "s_prob": edit_score(scores, [["es_prob"], ["gs_prob"], ["ls_prob"]]),
        "s_argmax": edit_score(scores, [["es_argmax"], ["gs_argmax"], ["ls_argmax"]]),
        "s_match": edit_score(scores, [["es_match"], ["gs_match"], ["ls_agree_tf"]]),
    }


def case_measures(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The measures of all standard questions of a case."""
    return {
        **score_efficacy(doc, answers),
        **score_paraphrase(doc, answers),
        **score_neighborhood(doc, answers),
    }


def contrast_measures(score: str, magnitude: str, probes: Sequence[ProbeAnswers], noun: str) -> dict[str, Measure]:
    """The likelihood measures of one kind of questions.

    Args:
        score, magnitude: prefixes of the metric names, as in ``es`` and ``em``.
        noun: the questions, for the reason if the case has none.
    """
    return {
        f"{score}_prob": mean_over(probes, noun, lambda answered: measures.prob(answered.wanted, answered.other)),
        f"{magnitude}_prob": mean_over(
            probes, noun, lambda answered: measures.prob_magnitude(answered.wanted, answered.other)
        ),
        f"{score}_argmax": mean_over(probes, noun, lambda answered: measures.tf_exact(answered.wanted)),
        f"{score}_match": mean_over(probes, noun, lambda answered: measures.tf_match(answered.wanted)),
    }


def exact_match_measure(score: str, probes: Sequence[ProbeAnswers], noun: str) -> dict[str, Measure]:
    """Exact match of the free generation with the wanted answer."""

    def exact_match(answered: ProbeAnswers) -> float:
        return measures.generated_match(answered.generation, answered.probe.gold)

    return {f"{score}_gen_em": mean_over(probes, noun, exact_match)}


def filter_known(scores: Mapping[str, Measure], probes: Sequence[ProbeAnswers]) -> dict[str, Measure]:
    """The published filter of BAKE on all ``_prob`` measures.

    The unfiltered measures are named ``_prob_all``.

    It excludes cases in which the unedited model already prefers the wanted target strictly.
    """

    def is_known() -> bool:
        return any(measures.prob(answered.wanted, answered.other, unedited=True) for answered in probes)

    filtered = dict(scores)
    for name, measure in scores.items():
        if name.endswith("_prob"):
            filtered |= {name: exclude_if(measure, is_known), f"{name}_all": measure}
    return filtered


def edit_score(scores: Mapping[str, Measure], factors: Sequence[Sequence[str]]) -> Measure:
    """The components of S for one case, in the form ``harmonic_of_means`` aggregates.

    Args:
        scores: measures by metric name.
        factors: per factor of the harmonic mean the metrics whose mean it is.

    Returns:
        A measure whose value has ``None`` for components that are unscored or excluded. It is unscored if all are.
    """

    def components() -> Score:
        evaluated = [[evaluate(scores[name]) for name in factor] for factor in factors]
        reasons = dict.fromkeys(score.reason for factor in evaluated for score in factor if score.reason is not None)
        values = [[score.value for score in factor] for factor in evaluated]
        if all(value is None for factor in values for value in factor):
            raise Unscored("; ".join(reasons) or "no component")
        return Score(value=values, reason="; ".join(reasons) or None)

    return components
