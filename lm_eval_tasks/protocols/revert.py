r"""Revert: the edit (s, r, o\*), then the edit back (s, r, o), compared with the unedited model.

- ``revert_old_prob``: the original object is preferred again, mean over edit prompt and paraphrases.
- ``revert_agree_prob``: share of these prompts with the unedited model's preference, o over o\* or not.
- ``revert_agree_tf``: share of tokens along o at which the argmax is the unedited model's, the same prompts.
- ``revert_drift``: mean of \|NLL_after - NLL_before\| over these prompts and both objects, nats per token.
- ``revert_neighborhood_agree_tf``, ``revert_neighborhood_drift``: the same on the neighbors and their answers.

A complete revert has 1 and 0. So has an editor without any effect: read these beside the efficacy of the same editor.
Definitions: docs/benchmarks/questions.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lm_eval_tasks.common.asking.answers import Answer
from lm_eval_tasks.common.asking.probes import CaseAnswers, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.likelihood import contrast_probe

NO_ORIGINAL = "original object to go back to"
NO_NEIGHBORS = "neighborhood prompts, or no original object to go back to"


def revert_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of two edits in turn; without an original object it has no questions."""
    request = case.request
    if request.target_true is None:
        return case_doc(case, [], generate=False)
    back = replace(request, target_new=request.target_true, target_true=request.target_new)
    probes = [
        contrast_probe(kind, question, "both")
        for kind in (EFFICACY, PARAPHRASE, NEIGHBORHOOD)
        for question in case.questions(kind)
    ]
    return case_doc(case, probes, generate=False) | {
        "edit_requests": [request.to_dict(), back.to_dict()],
        "edit_in_turn": True,
    }


def score_revert(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The measures above."""
    edited = [*answers.of_kind(EFFICACY), *answers.of_kind(PARAPHRASE)]
    neighbors = answers.of_kind(NEIGHBORHOOD)

    def drift_of_both(answered: ProbeAnswers) -> float:
        return (_drift(answered.wanted) + _drift(answered.other)) / 2

    return {
        # In the questions of the edit the new object is wanted, and the original one competes.
        "revert_old_prob": mean_over(
            edited, NO_ORIGINAL, lambda answered: measures.prob(answered.other, answered.wanted)
        ),
        "revert_agree_prob": mean_over(edited, NO_ORIGINAL, _same_preference),
        "revert_agree_tf": mean_over(edited, NO_ORIGINAL, lambda answered: measures.agree_tf(answered.other)),
        "revert_drift": mean_over(edited, NO_ORIGINAL, drift_of_both),
        "revert_neighborhood_agree_tf": mean_over(
            neighbors, NO_NEIGHBORS, lambda answered: measures.agree_tf(answered.wanted)
        ),
        "revert_neighborhood_drift": mean_over(neighbors, NO_NEIGHBORS, lambda answered: _drift(answered.wanted)),
    }


def _same_preference(answered: ProbeAnswers) -> float:
    before = measures.prob(answered.other, answered.wanted, unedited=True)
    return float(measures.prob(answered.other, answered.wanted) == before)


def _drift(answer: Answer) -> float:
    """Change of the NLL per token, in nats."""
    return abs(measures.nll(answer) - measures.nll(answer, unedited=True))
