"""Aggregation: what is unscored stays out of the mean and is counted; nothing depends on the order of cases."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.metrics import mean_stderr

from edit_hooks.edit_report import EditReport
from lm_eval_tasks.common.scoring.aggregation import (
    AGGREGATIONS,
    MAX_STEPS_SHOWN,
    edit_facts,
    edit_summary,
    harmonic_of_means,
    mean_scored,
    pooled_mean,
    reason_counts,
    retention_matrix,
    stderr_pooled,
    stderr_scored,
    total,
    total_scored,
)

values = st.lists(st.none() | st.floats(-1, 1), max_size=30)


def test_unscored_values_stay_out_of_the_mean() -> None:
    assert mean_scored([1.0, None, 0.0, None]) == 0.5
    assert mean_scored([None, None]) is None
    assert mean_scored([]) is None


def test_pooled_means_weigh_the_units_of_all_cases() -> None:
    """(0.5 * 3 + 1 * 1) / 4 = 5/8; the mean of the cases is 3/4."""
    cases = [{"value": 0.5, "weight": 3.0}, None, {"value": 1.0, "weight": 1.0}]
    assert pooled_mean(cases) == 0.625
    assert pooled_mean([None]) is None is total_scored([None])
    assert total_scored([2, None, 3]) == 5


def test_the_error_of_a_pooled_mean_resamples_cases_in_any_order() -> None:
    """Of two cases with equal weights, values 0 and 1, a resample has mean 0, 1/2, 1/2 or 1: deviation sqrt(1/8)."""
    cases = [{"value": 0.0, "weight": 2.0}, {"value": 1.0, "weight": 2.0}, None]
    error = stderr_pooled(cases)
    assert error == pytest.approx(math.sqrt(1 / 8), rel=0.05) and error == stderr_pooled(cases[::-1])
    assert stderr_pooled([{"value": 1.0, "weight": 2.0}] * 5) == 0.0
    assert stderr_pooled(cases[:1]) == "N/A"


def test_standard_error_is_that_of_the_scored_values() -> None:
    assert stderr_scored([1.0, None, 0.0, 1.0]) == pytest.approx(1 / 3)  # variance 1/3, n = 3
    assert stderr_scored([1.0, None]) == "N/A"
    assert stderr_scored([]) == "N/A"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_standard_error_equals_that_of_lm_eval(numbers: list[float]) -> None:
    assert stderr_scored(numbers) == pytest.approx(float(mean_stderr(numbers)), abs=1e-9)


@given(values, st.integers(0, 5), st.randoms(use_true_random=False))
def test_order_and_unscored_cases_change_nothing(numbers: list, num_unscored: int, rnd: random.Random) -> None:
    shuffled = numbers + [None] * num_unscored
    rnd.shuffle(shuffled)
    assert mean_scored(shuffled) == mean_scored(numbers)
    assert stderr_scored(shuffled) == stderr_scored(numbers)


@given(values)
def test_mean_lies_between_the_extremes(numbers: list) -> None:
    scored = [number for number in numbers if number is not None]
    if scored:
        assert min(scored) <= mean_scored(numbers) <= max(scored)


def test_reasons_are_counted_once_per_case() -> None:
    rows = [{"a": "no probe", "b": "no probe"}, {}, {"a": "edit failed"}, {"a": "no probe"}]
    assert json.loads(reason_counts(rows)) == {"no probe": 2, "edit failed": 1}
    assert list(json.loads(reason_counts(rows))) == ["no probe", "edit failed"]
    assert reason_counts([{}]) == "{}"
    assert total([1, 0, 1]) == 2


@pytest.mark.parametrize(
    ("es", "gs", "ls", "rqs", "rjs", "published"),
    [
        (29.12, 29.57, 70.15, 0.00, 0.00, 0.00),  # GPT-2 XL, unedited
        (38.99, 38.57, 61.09, 41.08, 30.81, 41.77),  # GPT-J, KN
        (99.70, 94.74, 66.30, 0.26, 40.78, 47.39),  # LLaMA-2 7B, ROME
        (98.69, 92.71, 53.60, 0.24, 34.86, 41.43),  # LLaMA-3 8B, ROME
        (97.99, 92.37, 79.18, 1.01, 35.48, 45.21),  # LLaMA-2 13B, AlphaEdit
    ],
)
def test_edit_score_of_published_rows(
    es: float, gs: float, ls: float, rqs: float, rjs: float, published: float
) -> None:
    rows = [[[es / 100], [gs / 100], [ls / 100], [rqs / 100, rjs / 100]]]
    assert 100 * harmonic_of_means(rows) == pytest.approx(published, abs=0.005)


def test_edit_score_averages_each_component_over_its_own_cases() -> None:
    rows = [[[1.0], [None], [1.0], [1.0, 0.0]], None, [[0.0], [1.0], [None], [0.0, 0.0]]]
    # ES 50, GS 100 (one case), LS 100 (one case), RS = (50 + 0) / 2 = 25
    assert harmonic_of_means(rows) == pytest.approx(4 / (1 / 50 + 2 / 100 + 1 / 25) / 100)


def test_edit_score_edge_cases() -> None:
    assert harmonic_of_means([[[1.0], [0.0]]]) == 0.0
    assert harmonic_of_means([[[1.0], [None]]]) is None
    assert harmonic_of_means([None]) is None
    assert harmonic_of_means([]) is None


@given(st.lists(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=1), min_size=4, max_size=4), min_size=1))
def test_edit_score_lies_between_its_smallest_and_largest_factor(rows: list) -> None:
    means = [round(100 * math.fsum(row[i][0] for row in rows) / len(rows), 2) / 100 for i in range(4)]
    assert min(means) - 1e-9 <= harmonic_of_means(rows) <= max(means) + 1e-9


def test_retention_averages_the_cases_of_a_step() -> None:
    cases = [
        {"step": 1, "values": [0.5]},
        {"step": 0, "values": [1.0, 0.0]},
        None,
        {"step": 0, "values": [1.0, None]},
        {"step": 0, "values": [0.0, 1.0]},
    ]
    for order in (cases, cases[::-1]):
        assert json.loads(retention_matrix(order, mean_scored)) == {
            "num_steps": 2,
            "diagonal_mean": 0.5833,  # (2/3 + 1/2) / 2: over steps, not over cases
            "last_row_mean": 0.5,
            "first_column": [0.6667, 0.5],
            "matrix": [[0.6667], [0.5, 0.5]],
        }
    assert retention_matrix([None], mean_scored) == retention_matrix([], mean_scored) == "{}"
    limited = json.loads(retention_matrix([{"step": 1, "values": [1.0, 0.0]}], mean_scored))
    assert limited["matrix"] == [[None], [None, 1.0], [None, 0.0, None]]  # the other steps' cases were not asked


def test_long_retention_is_shown_in_part_but_summarized_whole() -> None:
    num_steps = 101
    # only step 37 forgets: at once, and it is not among the steps shown
    cases = [{"step": step, "values": [float(step != 37)] * (num_steps - step)} for step in range(num_steps)]
    found = json.loads(retention_matrix(cases, mean_scored))
    assert found["steps_shown"] == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100] and len(found["matrix"]) == MAX_STEPS_SHOWN
    assert found["diagonal_mean"] == found["last_row_mean"] == round(100 / 101, 4)
    assert found["matrix"][2] == [1.0, 1.0, 1.0] and found["num_steps"] == num_steps


def test_edit_summary_averages_what_is_there() -> None:
    edits = [
        {"final_loss": 0.1, "steps": 20, "update_norm_ratio": 0.01, "seconds": 1.0, "stop_reason": "loss"},
        {"final_loss": 0.2, "steps": 25, "seconds": 2.0, "num_requests": 4},
        {"final_loss": float("nan"), "seconds": 3.0, "parts": [{}, {}]},
        {"seconds": 6.0, "step": 1, "num_edits": 8},  # second step of four edits each
        {"key": "k", "error": "not finite", "final_loss": 9.0},
        None,
    ]
    for order in (edits, edits[::-1]):
        assert json.loads(edit_summary(order)) == {
            "edits": 4,
            "failed": 1,
            "final_loss": 0.15,
            "steps": 22.5,
            "update_norm_ratio": 0.01,
            "seconds_per_edit": 1.12,  # (1 + 1/2 + 3/2 + 6/4) / 4
        }
    assert edit_summary([None, None]) == edit_summary([]) == "{}"


def test_edit_summary_has_the_memory_that_the_edits_need() -> None:
    """The largest peak, and nothing where none was measured, as on a CPU."""
    edits = [
        {"peak_memory_gib": 17.126, "model_memory_gib": 12.552, "seconds": 1.0},
        {"peak_memory_gib": 41.249, "model_memory_gib": 12.552, "seconds": 1.0},
        {"seconds": 1.0},  # loaded from a store of an older release
        {"peak_memory_gib": 90.0, "error": "not finite"},
        None,
    ]
    for order in (edits, edits[::-1]):
        assert json.loads(edit_summary(order)) == {
            "edits": 3,
            "failed": 1,
            "seconds_per_edit": 1.0,
            "peak_memory_gib": 41.2,
            "model_memory_gib": 12.6,
        }
    assert not {"peak_memory_gib", "model_memory_gib"} & set(json.loads(edit_summary([{"seconds": 1.0}])))


def test_edit_summary_names_the_constraints_of_the_edits() -> None:
    assert (
        json.loads(edit_summary([{"constraint": "identity"}, {"constraint": "identity"}, {}, None]))["constraint"]
        == "identity"
    )
    both = [{"constraint": "second_moment"}, {"constraint": "identity"}, {"error": "x", "constraint": "lost"}]
    assert json.loads(edit_summary(both))["constraint"] == "identity and second_moment"
    assert "constraint" not in json.loads(edit_summary([{"steps": 3}]))


def test_edit_summary_has_the_divergence_of_all_edits_of_a_stream() -> None:
    independent = [{"first_token_kl": 0.1}, {"first_token_kl": 0.4}, {"first_token_kl": float("nan")}, {}]
    found = json.loads(edit_summary(independent))
    assert (found["first_token_kl"], found["first_token_kl_not_finite"]) == (0.25, 1)
    stream = [{"first_token_kl": 0.1 * step, "step": step, "num_edits": step + 1} for step in (3, 1, 2, 3)]
    found = json.loads(edit_summary(stream))
    assert found["first_token_kl"] == 0.3 and "first_token_kl_not_finite" not in found
    broken = [{"first_token_kl": float("nan")}, {"first_token_kl": float("inf")}, {"error": "x"}]
    assert json.loads(edit_summary(broken)) == {"edits": 2, "failed": 1, "first_token_kl_not_finite": 2}
    assert "first_token_kl" not in edit_summary([{"step": 1}, {"error": "x", "first_token_kl": 1.0}])


@pytest.mark.parametrize(
    ("edit", "count"),
    [
        ({"initial_nll": 5.0, "final_nll": 0.1, "final_loss": 6.0}, 0),  # the loss has other terms
        ({"initial_nll": 5.0, "final_nll": 4.99}, 1),
        ({"initial_nll": 5.0, "final_loss": 7.0}, 1),
        ({"initial_nll": 0.03, "final_nll": 0.03}, 0),  # likely from the start
        ({"initial_nll": None, "final_nll": 3.0}, 0),
        ({"final_nll": 3.0}, 0),  # unknown
        ({"target_nll_before": 5.0, "target_nll_after": float("nan")}, 1),
        ({"target_nll_before": 0.03, "target_nll_after": float("inf")}, 1),
        ({"target_nll_before": float("nan"), "target_nll_after": float("nan")}, 0),  # the model before the edit, too
        ({"initial_nll": 5.0, "final_nll": 5.0, "error": "not finite"}, 0),
    ],
)
def test_edits_whose_target_becomes_no_likelier_are_counted(edit: dict[str, Any], count: int) -> None:
    assert (
        json.loads(edit_summary([edit, {"initial_nll": 4.0, "final_nll": 1.0}])).get("target_nll_not_lower", 0) == count
    )


def test_lm_eval_knows_our_aggregations_and_still_knows_its_own() -> None:
    from lm_eval.api.registry import get_aggregation, get_filter

    import lm_eval_tasks.common.task.task  # noqa: F401

    for name, function in AGGREGATIONS.items():
        assert get_aggregation(name) is function
    # Both registries of lm-eval fill themselves only while empty; adding ours first would hide its own.
    assert get_aggregation("mean") is not None
    assert get_filter("take_first") is not None


def test_questions_in_texts_that_an_edit_was_trained_on_are_counted() -> None:
    """Word for word; the edited prompt, which every editor is given, does not count, nor does one asked twice."""
    fact = "The ship Northern Star sails from"
    trained = [fact, f"Is it true that {fact} Hamburg? Answer:", "Question: Which ship sails from Hamburg?\nAnswer:"]
    edit = EditReport(editor="two_way", diagnostics={"trained_prompts": trained})
    questions = [
        fact,
        "Which ship sails from Hamburg?",
        "Which ship sails from Hamburg?",
        "Which ship sails from Kiel?",
    ]
    found = edit_facts(edit, [], questions)
    assert found is not None and found["questions_trained"] == 1
    assert json.loads(edit_summary([found, found]))["questions_trained"] == 2
    for other in ({}, {"trained_prompts": [trained]}, {"trained_prompts": "Which ship sails from Hamburg?"}):
        found = edit_facts(EditReport(editor="ft_m", diagnostics=other), [], questions)
        assert (
            found is not None and "questions_trained" not in found and "questions_trained" not in edit_summary([found])
        )
