r"""Negation: after an edit, the new object completes the affirmed prompt and not the negated one.

With the edit (s, r, o\*), a competitor c (the original object, or another record's where the record has none), frames
A_j (affirmed) and N_j (negated) around the edit prompt, and NLL per token:

- passed N_j: NLL(c | N_j) < NLL(o\* | N_j). Passed A_j: NLL(o\* | A_j) < NLL(c | A_j). Ties fail.
- ``negation_prob``: mean over j of passed N_j. ``negation_pair_prob``: mean over j of (passed A_j and passed N_j).
- ``negation_shift``: mean over j of m(A_j) - m(N_j) with the margin m(F) = NLL(c | F) - NLL(o\* | F).
- ``negation_verdict``: 1 if the model calls the new fact true and its denial false.
- ``negation_affirmed``: 1 if it calls the denial true.

A model that ignores the frame has a shift of 0, and passes no pair. Definitions: docs/benchmarks/questions.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.prompt_context import SPACE
from lm_eval_tasks.common.asking.documents import of_all_cases
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, case_mean
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.other_objects import draw_other_objects
from lm_eval_tasks.protocols.wordings import CLOZE, DENIED, FALSE, QUESTION, TRUE, Wording, fill, judgment, state

AFFIRMED, NEGATED, HELD, DENIAL = "affirmed", "negated", "held", "denied"
NO_COMPETITOR = "competing object: no original one, and no other object in the data"


# ------------------------------------------------------------------------ documents


@of_all_cases
def negation_docs(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Documents for cloze prompts."""
    return _negation_docs(cases, CLOZE)


@of_all_cases
def question_negation_docs(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Documents for questions."""
    return _negation_docs(cases, QUESTION)


def _negation_docs(cases: Sequence[Case], wording: Wording) -> Iterator[dict[str, Any]]:
    drawn = draw_other_objects(cases, 1, questions=wording.is_question)
    for case, other in zip(cases, drawn, strict=True):
        competitor = case.request.target_true or next(iter(other.objects), None)
        probes = [] if competitor is None else _probes(case, competitor, wording)
        drawn_from = None if case.request.target_true else other.to_json()
        yield case_doc(case, probes, generate=False) | {"competitor": competitor, "other": drawn_from}


def _probes(case: Case, competitor: str, wording: Wording) -> list[Probe]:
    prompt, new = case.request.text, case.request.target_new
    statement = state(wording, prompt, new, case.request.separator)
    completed = [(AFFIRMED, fill(frame, prompt=prompt), (new, competitor)) for frame in wording.affirmed]
    completed += [(NEGATED, fill(frame, prompt=prompt), (competitor, new)) for frame in wording.negated]
    judged = [
        (HELD, judgment(statement), (TRUE, FALSE)),
        (DENIAL, judgment(fill(DENIED, statement=statement)), (FALSE, TRUE)),
    ]
    return [
        Probe(kind=kind, prompt=text, targets=targets, separator=separator, gold=targets[0], ask="both")
        for questions, separator in ((completed, None), (judged, SPACE))
        for kind, text, targets in questions
    ]


# -------------------------------------------------------------------------- scoring


def score_negation(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The measures above, and those of the unedited model as ``_unedited``."""
    scores = _scores(answers, unedited=False)
    before = _scores(answers, unedited=True)
    return scores | {
        f"{name}_unedited": before[name] for name in ("negation_pair_prob", "negation_shift", "negation_verdict")
    }


def _scores(answers: CaseAnswers, *, unedited: bool) -> dict[str, Measure]:
    pairs = list(zip(answers.of_kind(AFFIRMED), answers.of_kind(NEGATED), strict=True))
    judged = list(zip(answers.of_kind(HELD), answers.of_kind(DENIAL), strict=True))

    def passed(answered: ProbeAnswers) -> float:
        return measures.prob(answered.wanted, answered.other, unedited=unedited)

    def both_passed(first: ProbeAnswers, second: ProbeAnswers) -> float:
        return passed(first) * passed(second)

    def shift(affirmed: ProbeAnswers, negated: ProbeAnswers) -> float:
        # The wanted answer is the new object in the affirmed frame, and the competitor in the negated one.
        margins = [
            measures.nll(answered.other, unedited=unedited) - measures.nll(answered.wanted, unedited=unedited)
            for answered in (affirmed, negated)
        ]
        return math.fsum(margins)

    def mean(
        found: Sequence[tuple[ProbeAnswers, ProbeAnswers]], value: Callable[[ProbeAnswers, ProbeAnswers], float]
    ) -> Measure:
        return lambda: case_mean((value(*pair) for pair in found), NO_COMPETITOR)

    def affirms(_held: ProbeAnswers, denial: ProbeAnswers) -> float:
        return measures.prob(denial.other, denial.wanted, unedited=unedited)

    return {
        "negation_prob": mean(pairs, lambda _affirmed, negated: passed(negated)),
        "negation_pair_prob": mean(pairs, both_passed),
        "negation_shift": mean(pairs, shift),
        "negation_verdict": mean(judged, both_passed),
        "negation_affirmed": mean(judged, affirms),
    }
