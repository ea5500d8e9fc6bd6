"""RLS, reverse locality: reverse questions about other objects keep their answer.

RQS alone is also won by an editor after which the edited subject answers *every* reverse question of the relation. So a
case also gets up to :data:`MAX_QUESTIONS` reverse questions of other records of its relation. The original answer of
each is wanted, and the edited subject of the case competes. The measure is ours and needs no data beyond the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from judges.squad import squad_normalize
from lm_eval_tasks.bake.benchmark import BakeCase
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers
from lm_eval_tasks.common.records.cases import Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.likelihood import contrast_probe

REVERSE_LOCALITY = "reverse_locality"
MAX_QUESTIONS = 3
QUESTIONS = "reverse questions about another object of its relation"  # for the reason of a case without any


def locality_probes(cases: Sequence[BakeCase], settings: Settings) -> Iterator[list[Probe]]:
    """The probes of every case, in the order of the cases.

    Their targets are the original answer and the edited subject of the case. If further edits of the run can have
    changed the answer on purpose, the subject that the question's own record makes the answer is a third target.
    """
    by_relation: dict[str, list[BakeCase]] = {}
    for case in cases:
        if case.request.relation_id is not None:
            by_relation.setdefault(case.request.relation_id, []).append(case)
    has_further_edits = settings.get("mode") in ("batch", "sequential") or settings.get("load_edit") is not None
    for case in cases:
        relation = case.request.relation_id
        chosen = [] if relation is None else choose_questions(case, by_relation[relation])
        yield [_probe(case, question, has_further_edits=has_further_edits) for question in chosen]


def choose_questions(case: BakeCase, candidates: Sequence[BakeCase]) -> list[Question]:
    """Up to :data:`MAX_QUESTIONS` reverse questions of other records whose right answer is not the edited subject.

    Left out are questions about the new object of the case, questions whose original answer is the edited subject, and
    those of another edit of that subject. SHA-256 of the edit and the question draws, so that neither the order of the
    records nor a version of Python matters.
    """
    if case.reverse_qa is None:
        return []
    subject, new_object = _normal(case.reverse_qa.wanted), _normal(case.request.target_new)
    found: dict[str, Question] = {}
    for other in candidates:
        question = other.reverse_qa
        if question is None or question.other is None:
            continue
        if _normal(other.request.target_new) == new_object or subject in (
            _normal(question.wanted),
            _normal(question.other),
        ):
            continue
        found.setdefault(question.prompt, question)
    return sorted(found.values(), key=lambda question: _draw(case, question))[:MAX_QUESTIONS]


def _draw(case: BakeCase, question: Question) -> bytes:
    return hashlib.sha256(f"{case.request.key} {question.prompt}".encode()).digest()


def _normal(text: str) -> str:
    return squad_normalize(text) or text


def _probe(case: BakeCase, question: Question, *, has_further_edits: bool) -> Probe:
    assert case.reverse_qa is not None and question.other is not None  # the choice drops both
    probe = contrast_probe(REVERSE_LOCALITY, Question(question.prompt, question.other, case.reverse_qa.wanted))
    return replace(probe, targets=(*probe.targets, question.wanted)) if has_further_edits else probe


def score_reverse_locality(answers: CaseAnswers) -> dict[str, Measure]:
    """RLS by likelihood: the share of the questions whose right answer is likelier than the edited subject."""
    return {f"{REVERSE_LOCALITY}_prob": mean_over(answers.of_kind(REVERSE_LOCALITY), QUESTIONS, _keeps_answer)}


def _keeps_answer(answered: ProbeAnswers) -> float:
    """1 if a right answer has a strictly lower NLL per token than the edited subject; ties fail."""
    original, subject, *edited = answered.targets
    return max(measures.prob(right, subject) for right in (original, *edited))
