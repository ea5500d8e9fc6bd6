"""Means over questions beside means over cases, recomputed from the scores in the samples."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import serve
from scripted import ScriptedLM
from task_runs import build, metrics_of, run

from lm_eval_tasks.common.scoring.aggregation import mean_scored, pooled_mean
from lm_eval_tasks.common.scoring.measures import Score, case_mean, evaluate

CASES = st.lists(st.lists(st.floats(-4, 4, allow_nan=False), min_size=1, max_size=5), min_size=1, max_size=6)


@given(CASES)
def test_micro_and_macro_are_those_of_the_plain_lists(cases: list[list[float]]) -> None:
    scores = [evaluate(lambda values=values: case_mean(values, "questions")) for values in cases]
    everything = [value for values in cases for value in values]
    macro = mean_scored([score.value for score in scores])
    micro = pooled_mean([score.weighted().value for score in scores])
    assert macro == pytest.approx(math.fsum(math.fsum(case) / len(case) for case in cases) / len(cases), abs=1e-12)
    assert micro == pytest.approx(math.fsum(everything) / len(everything), abs=1e-12)


@given(CASES)
def test_a_mean_of_means_has_the_questions_of_all(kinds: list[list[float]]) -> None:
    """As portability averages over kinds of questions."""
    score = evaluate(lambda: case_mean([case_mean(kind, "questions") for kind in kinds], "kinds"))
    everything = [value for kind in kinds for value in kind]
    assert score.weighted().value == {
        "value": pytest.approx(math.fsum(everything) / len(everything), abs=1e-12),
        "weight": len(everything),
    }
    assert type(score.value) is float  # what samples hold and ranks exchange


def test_a_value_over_no_questions_counts_once_and_a_missing_one_not_at_all() -> None:
    assert evaluate(lambda: 0.5).weighted().value == {"value": 0.5, "weight": 1}
    missing = Score(reason="no answer", failed=True)
    assert missing.weighted() == missing
    assert evaluate(lambda: case_mean([math.nan, 1.0], "questions")).weighted().value is None


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("bake_ls", "neighborhood_magnitude"),
        ("counterfact_fluency", "fluency_entropy"),
        ("counterfact_fluency", "fluency_entropy_change"),
    ],
)
def test_a_task_reports_both_over_cases_with_unequal_numbers_of_questions(task: str, metric: str) -> None:
    lm = ScriptedLM(texts=lambda context, unedited: context * (2 if unedited else 1), errors={"1": "no such layer"})
    results = run(task, lm, {"micro": True})
    found = metrics_of(results, task)
    scored = [sample for sample in results["samples"][task] if sample[metric] is not None]
    weights = [len(sample["doc"]["probes"]) for sample in scored]
    assert len(set(weights)) > 1
    wanted = math.fsum(sample[metric] * weight for sample, weight in zip(scored, weights, strict=True))
    assert found[f"{metric}_micro"] == pytest.approx(wanted / sum(weights), abs=1e-12)
    assert found[f"{metric}_micro"] != pytest.approx(found[metric], abs=1e-6)
    assert found[f"{metric}_micro_n"] == found[f"{metric}_n"] == len(scored)
    assert found[f"{metric}_micro_failed"] == found[f"{metric}_failed"]
    assert isinstance(found[f"{metric}_micro_stderr"], float)
    assert metrics_of(run(task, lm), task).items() <= found.items()  # the other columns are as without it


def test_only_means_over_cases_have_one() -> None:
    listed = {metric["metric"] for metric in build("bake_s", micro=True).config.metric_list}
    assert (
        "edit_score_reverse_prob" in listed and "edit_score_reverse_prob_micro" not in listed
    )  # a harmonic mean of means
    assert not [metric for metric in build("bake_ls").config.metric_list if metric["metric"].endswith("_micro")]


def test_populations_and_verdicts_have_one_too() -> None:
    task = "qaedit_wild_reliability"
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        judge = {"backend": "openai", "model": "m", "base_url": server.url, "store": None}
        settings: dict[str, Any] = {"judge": judge, "micro": True, "population": "wrong_em", "score_by": "origin"}
        results = run(task, ScriptedLM(), settings)
    found, judged = metrics_of(results, task), metrics_of(results, task, "judge")
    # one question per case, so both means agree
    assert found["efficacy_wild_em_micro@wrong_em"] == found["efficacy_wild_em@wrong_em"]
    assert judged["efficacy_wild_judge_micro"] == judged["efficacy_wild_judge"]
    by_origin = json.loads(judged["efficacy_wild_judge_micro_by_origin"])
    assert by_origin == json.loads(judged["efficacy_wild_judge_by_origin"])
