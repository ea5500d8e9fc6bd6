"""QAEdit as lm-eval tasks: the synthetic (teacher-forced) and the WILD (free) evaluation of the same edits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.options import switch
from lm_eval_tasks.common import measures
from lm_eval_tasks.common.cases import Case, Question
from lm_eval_tasks.common.measures import Excluded, Measure
from lm_eval_tasks.common.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.qaedit.records import QAEditRecord, context, load_records

__all__ = ["edit_requests", "load_records"]


Settings = Mapping[str, Any]


PRE_EDIT = "pre_edit"  # helper probe: does the unedited model answer the edited question wrongly?


def edit_requests(settings: Settings, subset: str | None = None) -> list[EditRequest]:
    """The benchmark's edits in file order, for runs that edit first and ask later (batch and sequential)."""
    return [record.request for record in load_records(settings).records]


def tuning_cases(settings: Settings, subset: str | None = None) -> list[Case]:
    """The benchmark's edits with their rephrased and unrelated questions, for ``lm-edit tune``."""
    return [
        Case(
            record.request,
            [Question(record.rephrase, record.request.target_new)],
            [Question(record.locality_question, record.locality_answer)],
        )
        for record in load_records(settings).records
    ]


# ------------------------------------------------------------------------ documents


def syn_reliability_doc(record: QAEditRecord, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the edited question."""
    return _syn_doc(record, settings, "efficacy", record.request.text, record.request.target_new)


def syn_generalization_doc(record: QAEditRecord, settings: Settings) -> dict[str, Any]:
    """Teacher forcing on the rephrased question."""
    return _syn_doc(record, settings, "paraphrase", record.rephrase, record.request.target_new)


def syn_locality_doc(record: QAEditRecord, settings: Settings) -> dict[str, Any]:
    """Teacher forcing along the answer of the unrelated question, edited against unedited."""
    doc = _syn_doc(record, settings, "neighborhood", record.locality_question, record.locality_answer)
    return doc | {"ask_unedited": True}


def wild_reliability_doc(record: QAEditRecord, settings: Settings) -> dict[str, Any]:
    """Free generation on the edited question."""
    return _wild_doc(record, settings, "efficacy", record.request.text, record.request.target_new)


def wild_generalization_doc(record: QAEditRecord, settings: Settings) -> dict[str, Any]:
    """Free generation on the rephrased question."""
    return _wild_doc(record, settings, "paraphrase", record.rephrase, record.request.target_new)


def wild_locality_doc(record: QAEditRecord, settings: Settings) -> dict[str, Any]:
    """Free generation on the unrelated question, edited against unedited."""
    doc = _wild_doc(record, settings, "neighborhood", record.locality_question, record.locality_answer)
    return doc | {"ask_unedited": True}


def _syn_doc(record: QAEditRecord, settings: Settings, kind: str, question: str, target: str) -> dict[str, Any]:
    return _doc(record, settings, Probe(kind=kind, prompt=question, targets=[target], gold=target))


def _wild_doc(record: QAEditRecord, settings: Settings, kind: str, question: str, gold: str) -> dict[str, Any]:
    prompt = _in_context(question, settings)
    return _doc(record, settings, Probe(kind=kind, prompt=prompt, generate=True, gold=gold, question=question))


def _doc(record: QAEditRecord, settings: Settings, probe: Probe) -> dict[str, Any]:
    """The document of one probe, with the helper probe of the published filter where that is on."""
    probes = [probe]
    if wrong_only := switch(settings, "initially_wrong", True):
        request = record.request
        prompt = _in_context(request.text, settings)
        probes.append(
            Probe(
                kind=PRE_EDIT,
                prompt=prompt,
                generate=True,
                gold=request.target_new,
                question=request.text,
                only_unedited=True,
            )
        )
    extras = {"source_id": record.source_id, "origin": record.origin}
    return case_doc(record.request, probes, ask_unedited=wrong_only, generate=probe.generate, extras=extras)


def _in_context(question: str, settings: Settings) -> str:
    return context(settings).replace("{question}", question)


# -------------------------------------------------------------------------- scoring


def score_syn_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TF-MATCH on the edited question."""
    return _with_filter("reliability_syn", lambda: measures.match(_own(answers).wanted), answers)


def score_syn_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """TF-MATCH on the rephrased question."""
    return _with_filter("generalization_syn", lambda: measures.match(_own(answers).wanted), answers)


def score_syn_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-TF on the unrelated question."""
    return _with_filter("locality_syn_agree_tf", lambda: measures.agree_tf(_own(answers).wanted), answers)


def score_wild_reliability(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The free generation on the edited question: EM, and whether it contains the gold answer."""
    return _wild_scores("reliability", answers)


def score_wild_generalization(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The free generation on the rephrased question, likewise."""
    return _wild_scores("generalization", answers)


def score_wild_locality(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """AGREE-GEN on the unrelated question, and how often both models wrote nothing."""
    found = _with_filter("locality_wild_agree_gen", lambda: measures.agree_gen(_own(answers).generation), answers)
    return found | {"locality_wild_both_empty": lambda: measures.both_empty(_own(answers).generation)}


def _own(answers: CaseAnswers) -> ProbeAnswers:
    """The task's own probe; the helper probe comes after it."""
    return answers.probes[0]


def _wild_scores(what: str, answers: CaseAnswers) -> dict[str, Measure]:
    own = _own(answers)
    found = _with_filter(
        f"{what}_wild_em", lambda: measures.generated_match(own.generation, own.probe["gold"]), answers
    )
    return found | {f"{what}_wild_contains": lambda: measures.generated_contains(own.generation, own.probe["gold"])}


def _with_filter(metric: str, measure: Measure, answers: CaseAnswers) -> dict[str, Measure]:
    """A metric over all rows, and over the rows the unedited model answers wrongly (what the paper reports)."""

    def initially_wrong() -> float:
        value = measure()
        (before,) = answers.of(PRE_EDIT)
        if measures.generated_match(before.generation, before.probe["gold"], unedited=True):
            raise Excluded
        return value

    return {metric: measure, f"{metric}_initially_wrong": initially_wrong}
