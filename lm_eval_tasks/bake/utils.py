"""BAKE as lm-eval tasks: which probes each task asks, and how a case is scored under the three protocols.

Protocols (README.md): P ``_prob``, A ``_argmax``, C ``_match`` / ``_agree_tf``; and free generation ``_gen_em``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.options import switch
from lm_eval_tasks.bake.records import BakeRecord, Question, judge_question, judge_template, load_records
from lm_eval_tasks.common import cases, measures, scoring
from lm_eval_tasks.common.cases import Case
from lm_eval_tasks.common.measures import Excluded, Measure, Score, Unscored, case_mean, evaluate
from lm_eval_tasks.common.probes import CaseAnswers, Probe, ProbeAnswers, case_doc

__all__ = ["edit_requests", "load_records"]


Settings = Mapping[str, Any]


NO_PARAPHRASES = "paraphrase prompts"


NO_NEIGHBORS = "neighborhood prompts"


def edit_requests(settings: Settings, subset: str = "qa") -> list[EditRequest]:
    """The benchmark's edits in file order, for runs that edit first and ask later (batch and sequential)."""
    return [record.request for record in load_records(settings, subset).records]


def tuning_cases(settings: Settings, subset: str = "qa") -> list[Case]:
    """The benchmark's edits with their rewordings and neighbors, for ``lm-edit tune``."""
    return [
        Case(
            record.request,
            [cases.Question(probe.prompt, *probe.targets) for probe in paraphrases(record)],
            [cases.Question(probe.prompt, *probe.targets) for probe in neighbors(record)],
        )
        for record in load_records(settings, subset).records
    ]


# --------------------------------------------------------------------------- probes


def efficacy(record: BakeRecord, generate: bool = False) -> list[Probe]:
    """The edit prompt itself: new against true object."""
    request = record.request
    return [_probe("efficacy", Question(request.text, request.target_new, request.target_true or ""), generate)]


def paraphrases(record: BakeRecord, generate: bool = False) -> list[Probe]:
    """Reworded edit prompts: new against true object."""
    new, true = record.request.target_new, record.request.target_true or ""
    return [_probe("paraphrase", Question(prompt, new, true), generate) for prompt in record.paraphrases]


def neighbors(record: BakeRecord, generate: bool = False) -> list[Probe]:
    """Prompts of other facts with the true object: it should stay ahead of the new one."""
    new, true = record.request.target_new, record.request.target_true or ""
    return [_probe("neighborhood", Question(prompt, true, new), generate) for prompt in record.neighbors]


def reverse_qa(record: BakeRecord, generate: bool = False) -> list[Probe]:
    """The reversed fact as a question: edited subject against the original one. None in BAKE-J."""
    return [] if record.reverse_qa is None else [_probe("reverse_qa", record.reverse_qa, generate)]


def reverse_judge(record: BakeRecord, settings: Settings, generate: bool = False) -> list[Probe]:
    """The reversed fact as a yes-no question, worded by the setting ``judge_template``."""
    return [_probe("reverse_judge", judge_question(record, judge_template(settings)), generate)]


def _probe(kind: str, question: Question, generate: bool) -> Probe:
    return Probe(
        kind=kind,
        prompt=question.prompt,
        targets=(question.wanted, question.other),
        generate=generate,
        gold=question.wanted,
    )


# ------------------------------------------------------------------------ documents


def efficacy_doc(record: BakeRecord, settings: Settings) -> dict[str, Any]:
    """Document of bake_es."""
    return _doc(record, settings, lambda generate: efficacy(record, generate), ask_unedited=False)


def paraphrase_doc(record: BakeRecord, settings: Settings) -> dict[str, Any]:
    """Document of bake_gs: all paraphrases of the case."""
    return _doc(record, settings, lambda generate: paraphrases(record, generate), ask_unedited=False)


def neighborhood_doc(record: BakeRecord, settings: Settings) -> dict[str, Any]:
    """Document of bake_ls: all neighbors of the case; agreement needs the unedited model."""
    return _doc(record, settings, lambda generate: neighbors(record, generate), ask_unedited=True)


def reverse_qa_doc(record: BakeRecord, settings: Settings) -> dict[str, Any]:
    """Document of bake_rq; the published filter needs the unedited model."""
    return _doc(record, settings, lambda generate: reverse_qa(record, generate), ask_unedited=True)


def reverse_judge_doc(record: BakeRecord, settings: Settings) -> dict[str, Any]:
    """Document of bake_rj; template and options are kept with the case."""
    doc = _doc(record, settings, lambda generate: reverse_judge(record, settings, generate), ask_unedited=True)
    return doc | {"judge_template": judge_template(settings), "judge_options": doc["probes"][0]["targets"]}


def edit_score_doc(record: BakeRecord, settings: Settings) -> dict[str, Any]:
    """Document of bake_s: every probe of the case, likelihoods only."""
    probes = [
        *efficacy(record),
        *paraphrases(record),
        *neighbors(record),
        *reverse_qa(record),
        *reverse_judge(record, settings),
    ]
    return case_doc(record.request, probes, ask_unedited=True, generate=False, extras={"source_id": record.source_id})


def _doc(
    record: BakeRecord, settings: Settings, ask: Callable[[bool], list[Probe]], *, ask_unedited: bool
) -> dict[str, Any]:
    generate = switch(settings, "generate", True)
    return case_doc(
        record.request,
        ask(generate),
        ask_unedited=ask_unedited,
        generate=generate,
        extras={"source_id": record.source_id},
    )


# -------------------------------------------------------------------------- scoring


def score_efficacy(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """ES, EM under all protocols."""
    probes = answers.of("efficacy")
    return _likelihood_measures("es", "em", probes, "edit prompt") | _generation_measures("es", probes, "edit prompt")


def score_paraphrase(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """GS, PM: mean over all paraphrases of the case."""
    probes = answers.of("paraphrase")
    return _likelihood_measures("gs", "pm", probes, NO_PARAPHRASES) | _generation_measures("gs", probes, NO_PARAPHRASES)


def score_neighborhood(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """LS, NM against the true object, and agreement with the unedited model."""
    probes = answers.of("neighborhood")
    return _likelihood_measures("ls", "nm", probes, NO_NEIGHBORS) | {
        "ls_agree_tf": _over(probes, NO_NEIGHBORS, lambda probe: measures.agree_tf(probe.wanted)),
        "ls_agree_gen": _over(probes, NO_NEIGHBORS, lambda probe: measures.agree_gen(probe.generation)),
    }


def score_reverse_qa(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """RQS, RQM with and without the published filter."""
    probes = answers.of("reverse_qa")
    found = _likelihood_measures("rqs", "rqm", probes, "reverse question")
    return _filtered(found, probes) | _generation_measures("rqs", probes, "reverse question")


def score_reverse_judge(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """RJS, RJM with and without the published filter; the first generated word against "yes"."""
    probes = answers.of("reverse_judge")
    found = _likelihood_measures("rjs", "rjm", probes, "judge question")
    return _filtered(found, probes) | {"rjs_gen_yes": _over(probes, "judge question", _says_yes)}


def score_edit_score(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Per protocol the case's components of S, in the form ``harmonic_of_means`` aggregates."""
    found = {
        **score_efficacy(doc, answers),
        **score_paraphrase(doc, answers),
        **score_neighborhood(doc, answers),
        **score_reverse_qa(doc, answers),
        **score_reverse_judge(doc, answers),
    }
    reverse = ["rqs", "rjs"] if answers.of("reverse_qa") else ["rjs"]  # BAKE-J: RS = RJS

    def factors(protocol: str, locality: str = "", reverse_protocol: str = "") -> list[list[Measure]]:
        return [
            [found[f"es_{protocol}"]],
            [found[f"gs_{protocol}"]],
            [found[f"ls_{locality or protocol}"]],
            [found[f"{score}_{reverse_protocol or protocol}"] for score in reverse],
        ]

    return {
        "s_prob": lambda: _components(factors("prob")),
        "s_prob_all": lambda: _components(factors("prob", reverse_protocol="prob_all")),
        "s_argmax": lambda: _components(factors("argmax")),
        "s_match": lambda: _components(factors("match", locality="agree_tf")),
    }


def _likelihood_measures(score: str, size: str, probes: Sequence[ProbeAnswers], what: str) -> dict[str, Measure]:
    """The likelihood-based measures of one probe kind; ``size`` names the magnitude."""
    return {
        f"{score}_prob": _over(probes, what, lambda probe: measures.prob(probe.wanted, probe.other)),
        f"{size}_prob": _over(probes, what, lambda probe: measures.prob_magnitude(probe.wanted, probe.other)),
        f"{score}_argmax": _over(probes, what, lambda probe: measures.argmax(probe.wanted)),
        f"{score}_match": _over(probes, what, lambda probe: measures.match(probe.wanted)),
    }


def _generation_measures(score: str, probes: Sequence[ProbeAnswers], what: str) -> dict[str, Measure]:
    def matches(probe: ProbeAnswers) -> float:
        return measures.generated_match(probe.generation, probe.probe["gold"])

    return {f"{score}_gen_em": _over(probes, what, matches)}


def _over(probes: Sequence[ProbeAnswers], what: str, measure: Callable[[ProbeAnswers], float]) -> Measure:
    """Case-first macro average: the mean of a measure over the probes of one case."""
    return lambda: case_mean((measure(probe) for probe in probes), what)


def _filtered(found: dict[str, Measure], probes: Sequence[ProbeAnswers]) -> dict[str, Measure]:
    """Published filter of protocol P: leave out cases in which the unedited model has NLL(other) > NLL(wanted).

    ``_prob`` is the filtered value, ``_prob_all`` the one over all cases.
    """

    def keep_unknown(measure: Measure) -> Measure:
        def filtered() -> float:
            value = measure()
            if any(measures.prob(probe.wanted, probe.other, unedited=True) for probe in probes):
                raise Excluded
            return value

        return filtered

    everywhere = {f"{name}_all": measure for name, measure in found.items() if name.endswith("_prob")}
    return {
        name: keep_unknown(measure) if name.endswith("_prob") else measure for name, measure in found.items()
    } | everywhere


def _says_yes(probe: ProbeAnswers) -> float:
    return float(scoring.first_word(measures.generation(probe.generation).text) == "yes")


def _components(factors: list[list[Measure]]) -> Score:
    """All components of a case, ``None`` where unscored or excluded, and the reasons for the unscored ones."""
    scores = [[evaluate(component) for component in factor] for factor in factors]
    reasons = dict.fromkeys(score.reason for factor in scores for score in factor if score.reason is not None)
    values = [[score.value for score in factor] for factor in scores]
    if all(value is None for factor in values for value in factor):
        raise Unscored("; ".join(reasons) or "no component")
    return Score(value=values, reason="; ".join(reasons) or None)
