"""Models of one trick each against the questions that repetition does not pass, through lm-eval on invented records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from scripted import ScriptedLM
from task_runs import TASKS, metrics_of, run

QUESTIONS = ("negation", "truth", "mcq", "revert")
OURS = [task for task in TASKS if task.endswith(QUESTIONS)]

# (request, is the unedited model asked) -> whether the model likes the request's target
Character = Callable[[Instance, bool], bool]


class Scripted(ScriptedLM):
    """Answers every target with NLL 1 per token where its character likes it, else 2."""

    def __init__(self, character: Character) -> None:
        super().__init__(self._likelihoods)
        self.character = character
        self.request: Instance | None = None

    def _answer(self, request: Instance, answer: Any) -> Any:
        self.request = request
        return super()._answer(request, answer)

    def _likelihoods(self, context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        assert self.request is not None
        num_tokens = len(continuation.split())
        liked = self.character(self.request, unedited)
        return (-1.0 if liked else -2.0) * num_tokens, [0 if liked else 9] * num_tokens


def target(request: Instance) -> str:
    return request.args[1].strip()


def new_object(request: Instance) -> str:
    return request.doc["edit_requests"][0]["target_new"]


def original(request: Instance, unedited: bool) -> bool:
    """The unedited model of all characters: it knows the original objects and has no opinion on labels."""
    return target(request) != new_object(request) and target(request) not in ("True", "False", *"ABCD")


def perfect(request: Instance, unedited: bool) -> bool:
    if unedited or "edit_in_turn" in request.doc:
        return original(request, unedited)
    return target(request) == request.doc["asked"]["gold"]


def parrot(request: Instance, unedited: bool) -> bool:
    """Repeats the new object, and affirms whatever contains it."""
    if unedited:
        return original(request, unedited)
    wanted, said = new_object(request), target(request)
    if said in ("True", "False"):
        return (said == "True") == (f"{wanted}." in request.args[0])
    return said == wanted


def always(label: str) -> Character:
    return lambda request, unedited: target(request) == label


def no_edit(request: Instance, unedited: bool) -> bool:
    return original(request, unedited)


CHARACTERS: dict[str, Character] = {
    "perfect": perfect,
    "parrot": parrot,
    "no edit": no_edit,
    **{label: always(label) for label in ("True", "False", "A", "B", "C", "D")},
}


@functools.cache
def found(task: str, character: str) -> dict[str, Any]:
    return metrics_of(run(task, Scripted(CHARACTERS[character])), task)


@pytest.mark.parametrize("task", OURS)
def test_a_perfect_model_has_full_marks(task: str) -> None:
    scores = found(task, "perfect")
    kind = task.rpartition("_")[2]
    full = {
        "negation": {"negation_pair_prob": 1, "negation_prob": 1, "negation_verdict": 1, "negation_affirmed": 0},
        "truth": {"truth_acc": 1, "truth_acc_calibrated": 1, "truth_called_true": 0.5, "truth_other_rejected": 1},
        "mcq": {"mcq_new": 1, "mcq_other": 0, "mcq_none": 0, "mcq_position_bias": 0},
        "revert": {"revert_agree_prob": 1, "revert_agree_tf": 1, "revert_drift": 0, "revert_neighborhood_drift": 0},
    }[kind]
    assert {name: scores[name] for name in full} == full
    assert scores["negation_shift" if kind == "negation" else "unscored"] >= 0


@pytest.mark.parametrize("task", [task for task in OURS if task.endswith(("negation", "truth", "revert"))])
def test_a_parrot_fails(task: str) -> None:
    scores = found(task, "parrot")
    kind = task.rpartition("_")[2]
    expected = {
        "negation": {"negation_pair_prob": 0, "negation_prob": 0, "negation_shift": 0, "negation_verdict": 0},
        "truth": {"truth_acc": 0.5, "truth_new": 1, "truth_old": 1, "truth_neighbor": 0, "truth_bleed": 0},
        "revert": {"revert_agree_prob": 0, "revert_old_prob": 0, "revert_drift": 1},
    }[kind]
    assert {name: scores[name] for name in expected} == expected


@pytest.mark.parametrize("task", [task for task in OURS if task.endswith("truth")])
@pytest.mark.parametrize("label", ["True", "False"])
def test_one_label_has_exactly_one_half(task: str, label: str) -> None:
    scores = found(task, label)
    assert scores["truth_acc"] == scores["truth_acc_calibrated"] == scores["truth_acc_unedited"] == 0.5
    assert scores["truth_called_true"] == (label == "True")
    assert found(task.replace("truth", "negation"), label)["negation_verdict"] == 0


@pytest.mark.parametrize("task", [task for task in OURS if task.endswith("mcq")])
@pytest.mark.parametrize("letter", "ABCD")
def test_one_letter_has_exactly_one_quarter(task: str, letter: str) -> None:
    scores = found(task, letter)
    assert (scores["mcq_new"], scores["mcq_none"], scores["mcq_position_bias"]) == (0.25, 0.25, 0.75)


@pytest.mark.parametrize("task", OURS)
def test_no_edit_has_the_anchors(task: str) -> None:
    """Without an edit: no pair, one half, chance, and nothing to take back."""
    scores = found(task, "no edit")
    anchors = {
        "negation": {"negation_pair_prob": 0, "negation_prob": 1, "negation_shift": 0},
        "truth": {"truth_acc": 0.5, "truth_acc_calibrated": 0.5},
        "mcq": {"mcq_new": 0.25, "mcq_new_unedited": 0.25},
        "revert": {"revert_agree_prob": 1, "revert_agree_tf": 1, "revert_drift": 0, "revert_neighborhood_agree_tf": 1},
    }[task.rpartition("_")[2]]
    assert {name: scores[name] for name in anchors} == anchors
    same = {name: value for name, value in scores.items() if f"{name}_unedited" in scores}
    assert same == {name: scores[f"{name}_unedited"] for name in same}
