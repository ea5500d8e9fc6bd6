"""Edits taken back, by hand: the two requests in turn, and the distance from the unedited model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from scripted import ScriptedLM
from task_runs import from_nlls, metrics_of, run

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.scoring.measures import evaluate
from lm_eval_tasks.protocols import revert

PROMPT = "Port Elna is the capital of"
REPHRASED = ["Port Elna, the seat of the government of", "Port Elna serves as capital city of"]
NEIGHBORS = ["The parliament of Port Elna belongs to", "Lake Mirrow lies in"]


def first_sample(table: Mapping[tuple[str, str], tuple[float, float]]) -> dict[str, Any]:
    return run("bake_revert", ScriptedLM(from_nlls(dict(table))), limit=1)["samples"]["bake_revert"][0]


def test_the_document_edits_there_and_back_in_turn() -> None:
    sample = first_sample({})
    there, back = sample["doc"]["edit_requests"]
    assert (there["target_new"], there["target_true"]) == ("Dravonia", "Ostmark")
    assert back == there | {"target_new": "Ostmark", "target_true": "Dravonia"}
    assert sample["doc"]["edit_in_turn"] is True
    assert [probe["ask"] for probe in sample["doc"]["probes"]] == ["both"] * 5


def test_drift_and_agreement_by_hand() -> None:
    sample = first_sample(
        {
            (PROMPT, "Ostmark"): (1.5, 1.0),  # edited, unedited
            (PROMPT, "Dravonia"): (3.0, 4.0),
            (REPHRASED[0], "Ostmark"): (3.0, 1.0),  # o* is still preferred
            (REPHRASED[0], "Dravonia"): (2.0, 2.5),
            (REPHRASED[1], "Ostmark"): (4.0, 4.0),  # o* was preferred before, too
            (REPHRASED[1], "Dravonia"): (2.0, 2.0),
            (NEIGHBORS[0], "Ostmark"): (1.25, 1.0),
            (NEIGHBORS[1], "Ostmark"): (2.0, 3.0),
        }
    )
    assert sample["revert_old_prob"] == pytest.approx((1 + 0 + 0) / 3)
    assert sample["revert_agree_prob"] == pytest.approx((1 + 0 + 1) / 3)
    # prompts: (0.5 + 1) / 2, (2 + 0.5) / 2, 0
    assert sample["revert_drift"] == pytest.approx((0.75 + 1.25 + 0) / 3)
    assert sample["revert_neighborhood_drift"] == pytest.approx((0.25 + 1) / 2)
    assert (
        sample["revert_agree_tf"] == sample["revert_neighborhood_agree_tf"] == 1.0
    )  # the script's argmax is the target


def test_agreement_is_along_the_original_object_and_the_neighbors_answer() -> None:
    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        changed = not unedited and continuation.strip() == "Ostmark" and context in (PROMPT, NEIGHBORS[1])
        return -1.0, [7 if changed else 0] * len(continuation.split())

    sample = run("bake_revert", ScriptedLM(likelihoods), limit=1)["samples"]["bake_revert"][0]
    assert sample["revert_agree_tf"] == pytest.approx(2 / 3)
    assert sample["revert_neighborhood_agree_tf"] == 0.5


def test_a_complete_revert_has_the_values_of_no_edit() -> None:
    found = metrics_of(run("bake_revert", ScriptedLM(lambda *args: from_nlls({})(*args[:2], True))), "bake_revert")
    assert found["revert_agree_prob"] == found["revert_agree_tf"] == found["revert_neighborhood_agree_tf"] == 1.0
    assert found["revert_drift"] == found["revert_neighborhood_drift"] == 0.0


def test_without_an_original_object_there_is_nothing_to_go_back_to() -> None:
    request = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk", case_id="0")
    doc = revert.revert_doc(Case(request, neighbors=[Question("Lund lies in", "Sud")]), {})
    assert doc["edit_requests"] == [request.to_dict()] and "edit_in_turn" not in doc
    measures = revert.score_revert(doc, CaseAnswers(doc, [ScriptedLM()._likelihood(("x", " Karsk"), False)]))
    assert {evaluate(measure).value for measure in measures.values()} == {None}
    assert evaluate(measures["revert_drift"]).reason == "the record has no original object to go back to"
