"""Overlap after prompts about other facts: shares by hand, and what is unscored."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scripted import ScriptedLM
from task_runs import metrics_of, run

from edit_hooks.answers import EditedAnswer, StateSimilarity

TASK = "bake_ls_overlap"


class Overlapping(ScriptedLM):
    """Answers the prompts of a case with these overlaps in turn; the last one goes on."""

    def __init__(self, *overlaps: float) -> None:
        super().__init__()
        self.overlaps, self.asked = overlaps, list[str]()

    def _answer(self, request: Any, answer: Any) -> Any:
        self.asked.append(request.args[0])
        number = [probe["prompt"] for probe in request.doc["probes"]].index(request.doc["asked"]["question"])
        overlap = self.overlaps[min(number, len(self.overlaps) - 1)]
        return EditedAnswer(final=StateSimilarity(overlap=overlap))


def test_shares_by_hand() -> None:
    """Neighbors whose distribution moved by .005, .05 and .5."""
    model = Overlapping(0.995, 0.95, 0.5)
    results = run(TASK, model, limit=1)
    sample = results["samples"][TASK][0]
    prompts = [probe["prompt"] for probe in sample["doc"]["probes"]]
    assert model.asked == prompts and len(prompts) == 2
    found = metrics_of(results, TASK)
    assert found["neighborhood_overlap"] == pytest.approx((0.995 + 0.95) / 2)
    assert (found["neighborhood_within_10"], found["neighborhood_within_1"]) == (1.0, 0.5)


def test_a_bound_is_reached_at_the_bound_itself() -> None:
    found = metrics_of(run(TASK, Overlapping(0.9, 0.99), limit=1), TASK)
    assert (found["neighborhood_within_10"], found["neighborhood_within_1"]) == (1.0, 0.5)


def test_a_distribution_that_is_not_finite_is_a_failure() -> None:
    found = metrics_of(run(TASK, Overlapping(math.nan), limit=1), TASK)
    assert found["neighborhood_overlap"] is None and found["neighborhood_overlap_failed"] == 1
    assert "one is not finite" in found["unscored_reason"]


def test_a_model_that_compares_nothing_is_unscored() -> None:
    found = metrics_of(run(TASK, ScriptedLM(), limit=1), TASK)
    assert found["neighborhood_overlap"] is None and found["neighborhood_overlap_n"] == 0
    assert "--model edited_hf" in found["unscored_reason"]
