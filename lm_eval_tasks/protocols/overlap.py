"""Overlap: how far the next-token distribution after prompts about other facts has moved.

The locality that asks for a likelier answer, or for the same one, has two values per prompt, so it cannot tell an edit
that moves nothing from one that leaves most arguments of the maximum alone; and a target of several tokens is mostly
spelling. Here the distributions p of the unedited and q of the edited model after a prompt are compared, at its first
new token, so that no answer has to be known or spelt:

    overlap = 1 - TV(p, q),    TV(p, q) = 1/2 sum over v of abs(p(v) - q(v))

- ``neighborhood_overlap``: its mean over the prompts of a case. As the area under the share of prompts with TV <= t
  over t it is the mean over all degrees of strictness.
- ``neighborhood_within_10``, ``neighborhood_within_1``: that share at t = 0.1 and t = 0.01.

The measure is ours. That locality in use tells editors poorly apart, and what a better one needs (no determined answer,
no bias towards fluent text, adjustable strictness), is the finding of arXiv:2601.17343, whose own protocol this is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from edit_hooks.state_reading import NEXT_TOKEN, StateReading
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import NEIGHBORHOOD, Case
from lm_eval_tasks.common.scoring.measures import Measure, mean_over, next_token_overlap
from lm_eval_tasks.common.settings import Settings

PROMPTS = "neighborhood prompts"
PERCENT = (10, 1)


def overlap_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of all neighbors of a case."""
    probes = [
        Probe(
            kind=NEIGHBORHOOD,
            prompt=question.prompt,
            targets=[question.wanted],
            states=StateReading(prompt=question.prompt, state=NEXT_TOKEN),
        )
        for question in case.neighbors
    ]
    return case_doc(case, probes, generate=False)


def score_overlap(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The measures above."""
    asked = answers.of_kind(NEIGHBORHOOD)
    within = {
        f"neighborhood_within_{percent}": mean_over(asked, PROMPTS, partial(_within, 1 - percent / 100))
        for percent in PERCENT
    }
    return {"neighborhood_overlap": mean_over(asked, PROMPTS, _overlap)} | within


def _overlap(answered: ProbeAnswers) -> float:
    return next_token_overlap(answered.wanted)


def _within(least: float, answered: ProbeAnswers) -> float:
    return float(_overlap(answered) >= least)
