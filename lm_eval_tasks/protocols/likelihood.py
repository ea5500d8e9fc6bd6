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
from functools import partial
from typing import Any, Protocol

from edit_hooks.decoding import AskedModel
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, KINDS, NEIGHBORHOOD, PARAPHRASE, Case, Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.columns import ALL_CASES, over
from lm_eval_tasks.common.scoring.measures import (
    ComponentMeasure,
    Measure,
    any_true,
    exclude_if,
    mean_over,
)
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
    separator: str | None = None,
) -> dict[str, Any]:
    """The document of one kind of questions.

    The model also generates an answer unless the setting :data:`GENERATE` is off.

    Args:
        ask: the model that scores the targets.
        ask_generation: the model that generates, if that is another one.
        separator: white space before the answers, if not that of the case: behind wordings of ours.
    """
    generate = GENERATE.read(settings)
    probes = [contrast_probe(kind, question, ask, generate=generate, separator=separator) for question in questions]
    return case_doc(case, [replace(probe, ask_generation=ask_generation) for probe in probes], generate=generate)


def case_probes(case: Case) -> list[Probe]:
    """Probes of all standard questions of a case, without generation; locality needs the unedited model."""
    return [
        contrast_probe(kind, question, "both" if kind == NEIGHBORHOOD else "edited")
        for kind in KINDS
        for question in case.questions(kind)
    ]


def contrast_probe(
    kind: str,
    question: Question,
    ask: AskedModel = "edited",
    *,
    generate: bool = False,
    separator: str | None = None,
) -> Probe:
    """A probe that scores the wanted answer and, where there is one, its competitor."""
    targets = (question.wanted,) if question.other is None else (question.wanted, question.other)
    return Probe(
        kind=kind,
        prompt=question.prompt,
        targets=targets,
        separator=separator,
        generate=generate,
        gold=question.wanted,
        ask=ask,
    )


# -------------------------------------------------------------------------- scoring


class Success(Protocol):
    """Success of one model at one question, in 0..1."""

    def __call__(self, answered: ProbeAnswers, *, unedited: bool = False) -> float: ...


def _prob(answered: ProbeAnswers, *, unedited: bool = False) -> float:
    return measures.prob(answered.wanted, answered.other, unedited=unedited)


def _argmax(answered: ProbeAnswers, *, unedited: bool = False) -> float:
    return measures.tf_exact(answered.wanted, unedited=unedited)


def _match(answered: ProbeAnswers, *, unedited: bool = False) -> float:
    return measures.tf_match(answered.wanted, unedited=unedited)


# Success under each protocol, by the ending of the metric's name.
SUCCESSES: Mapping[str, Success] = {"prob": _prob, "argmax": _argmax, "match": _match}
MAGNITUDE = "magnitude"  # ending of the difference of the two probabilities per token, which ``prob`` compares


def score_efficacy(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """ES and its magnitude EM on the edit prompt."""
    probes, noun = answers.of_kind(EFFICACY), PROMPTS[EFFICACY]
    return contrast_measures(EFFICACY, probes, noun) | exact_match_measure(EFFICACY, probes, noun)


def score_paraphrase(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """GS and its magnitude PM, averaged over all paraphrases of the case."""
    probes, noun = answers.of_kind(PARAPHRASE), PROMPTS[PARAPHRASE]
    return contrast_measures(PARAPHRASE, probes, noun) | exact_match_measure(PARAPHRASE, probes, noun)


def score_neighborhood(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """LS and its magnitude NM on all neighbors, and agreement with the unedited model."""
    probes, noun = answers.of_kind(NEIGHBORHOOD), PROMPTS[NEIGHBORHOOD]
    return contrast_measures(NEIGHBORHOOD, probes, noun) | {
        "neighborhood_agree_tf": mean_over(probes, noun, lambda answered: measures.agree_tf(answered.wanted)),
        "neighborhood_agree_gen": mean_over(probes, noun, lambda answered: measures.agree_gen(answered.generation)),
    }


def score_edit_score(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """S of efficacy, paraphrases and neighborhood under each protocol (ROME; MEMIT)."""
    scores = case_measures(doc, answers)
    return {
        "edit_score_prob": edit_score(scores, [["efficacy_prob"], ["paraphrase_prob"], ["neighborhood_prob"]]),
        "edit_score_argmax": edit_score(scores, [["efficacy_argmax"], ["paraphrase_argmax"], ["neighborhood_argmax"]]),
        "edit_score_match": edit_score(scores, [["efficacy_match"], ["paraphrase_match"], ["neighborhood_agree_tf"]]),
    }


def case_measures(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The measures of all standard questions of a case."""
    return {
        **score_efficacy(doc, answers),
        **score_paraphrase(doc, answers),
        **score_neighborhood(doc, answers),
    }


def contrast_measures(prefix: str, probes: Sequence[ProbeAnswers], noun: str) -> dict[str, Measure]:
    """The likelihood measures of one kind of questions.

    Args:
        prefix: of the metric names, as in ``efficacy``.
        noun: the questions, for the reason if the case has none.
    """
    by_protocol = {f"{prefix}_{name}": mean_over(probes, noun, success) for name, success in SUCCESSES.items()}
    return by_protocol | {
        f"{prefix}_{MAGNITUDE}": mean_over(
            probes, noun, lambda answered: measures.prob_magnitude(answered.wanted, answered.other)
        )
    }


def exact_match_measure(prefix: str, probes: Sequence[ProbeAnswers], noun: str) -> dict[str, Measure]:
    """Exact match of the free generation with the wanted answer."""

    def exact_match(answered: ProbeAnswers) -> float:
        return measures.generated_match(answered.generation, answered.probe.gold)

    return {f"{prefix}_gen_em": mean_over(probes, noun, exact_match)}


def logprob_measures(prefix: str, probes: Sequence[ProbeAnswers], noun: str) -> dict[str, Measure]:
    """Mean log-probability per token of both targets, in nats, of the edited and the unedited model.

    The names are ``<prefix>_logprob_new`` for the wanted target and ``_true`` for the competing one, with the ending
    ``_unedited`` for the unedited model.
    """

    def mean_logprob(answered: ProbeAnswers, *, target: str, unedited: bool) -> float:
        answer = answered.wanted if target == "new" else answered.other
        return -measures.nll(answer, unedited=unedited)

    return {
        f"{prefix}_logprob_{target}{ending}": mean_over(
            probes, noun, partial(mean_logprob, target=target, unedited=bool(ending))
        )
        for target in ("new", "true")
        for ending in ("", "_unedited")
    }


def filter_known(scores: Mapping[str, Measure], probes: Sequence[ProbeAnswers]) -> dict[str, Measure]:
    """The filter of BAKE's reverse questions on all measures of :func:`contrast_measures`.

    It excludes the cases in which the unedited model already succeeds, so that every filtered score of the unedited
    model is 0. The protocol of the measure decides: for ``_prob`` the unedited model prefers the wanted target strictly
    (the published filter), for ``_argmax`` all its argmaxes are the wanted target's tokens, for ``_match`` at least one
    is. The unfiltered measures have the ending ``@all``.
    """
    filtered = dict(scores)
    known_by = {**SUCCESSES, MAGNITUDE: SUCCESSES["prob"]}
    for name, measure in scores.items():
        if (success := known_by.get(name.rpartition("_")[2])) is not None:
            is_known = partial(_any_known, probes, success)
            filtered |= {name: exclude_if(measure, is_known), over(name, ALL_CASES): measure}
    return filtered


def _any_known(probes: Sequence[ProbeAnswers], success: Success) -> bool:
    return any_true(probes, partial(success, unedited=True))


def edit_score(scores: Mapping[str, Measure], factors: Sequence[Sequence[str]]) -> Measure:
    """The components of S for one case, in the form ``harmonic_of_means`` aggregates.

    Args:
        scores: measures by metric name.
        factors: per factor of the harmonic mean the metrics whose mean it is.

    Returns:
        A measure whose value has ``None`` for components that are unscored or excluded. It is unscored if all are.
    """
    return ComponentMeasure([[scores[name] for name in factor] for factor in factors])
